"""Validation of calls, beyond the limits that router and engine share.

Nothing here waits or depends on an engine's state: an invalid request is invalid at any time.
"""

from collections.abc import Sequence

from octavo.common import limits as common
from octavo.common import rpc
from octavo.common.limits import MAX_REQUEST_ID, Limits, check_token_ids
from octavo.router.requests.tool_validation import check_call, check_excluded, check_tools
from octavo.router.text.detokenizer import Pieces
from octavo.v1 import generation_pb2

DETAILS = ("", "auto", "low", "high")
ROLES = ("system", "developer", "user", "assistant", "tool")

PromptRequest = generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest


def check_request_id(request_id: str) -> None:
    """Check that an id is empty, or suitable for logs and metadata.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT.
    """
    visible = all("!" <= c <= "~" for c in request_id)
    if len(request_id) > MAX_REQUEST_ID or not visible:
        raise rpc.invalid(
            "request_id",
            f"request_id must be at most {MAX_REQUEST_ID} characters of visible ASCII, "
            "without spaces",
        )


def check_request(request: generation_pb2.GenerateRequest, limits: Limits) -> None:
    """Check everything but the id, before the prompt is tokenized.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT, or UNIMPLEMENTED for beam search where
            there is none, with the field's name.
    """
    _check_prompt(request, limits)
    if request.HasField("beam") and request.HasField("sampling"):
        raise rpc.invalid("beam", "beam excludes sampling; set only one of them")
    check_excluded(request)
    common.check_texts(
        "bad_words", request.bad_words, common.MAX_BAD_WORDS, common.MAX_BAD_WORD_LENGTH
    )
    common.check_parameters(request, limits)


def check_chat(request: PromptRequest, limits: Limits) -> None:
    """Check that the prompt is set, and the parts of a chat that need no template."""
    if request.WhichOneof("prompt") is None:
        raise rpc.invalid("prompt", "a prompt must be set")
    if request.WhichOneof("prompt") != "chat":
        return
    if not request.chat.messages:
        raise rpc.invalid("chat.messages", "chat.messages must hold at least one message")
    if len(request.chat.messages) > limits.max_model_len:
        raise rpc.invalid(
            "chat.messages",
            f"chat.messages may have at most {limits.max_model_len} entries, the model's tokens; "
            f"it has {len(request.chat.messages)}",
            reason=rpc.CONTEXT_LENGTH_EXCEEDED,
        )
    if request.chat.continue_final_message and request.chat.add_generation_prompt:
        raise rpc.invalid(
            "chat.continue_final_message",
            "chat.continue_final_message excludes chat.add_generation_prompt; set only one of them",
        )
    for i, message in enumerate(request.chat.messages):
        _check_message(f"chat.messages[{i}]", message)
    common.check_count("chat.messages.parts", len(image_parts(request.chat)), common.MAX_IMAGES)
    check_tools(request.chat)


def image_parts(
    chat: generation_pb2.ChatPrompt,
) -> list[tuple[str, generation_pb2.ImagePart]]:
    """Return a chat's images, in order, each with its place in the request."""
    return [
        (f"chat.messages[{i}].parts[{j}].image", part.image)
        for i, message in enumerate(chat.messages)
        for j, part in enumerate(message.parts)
        if part.HasField("image")
    ]


def _check_message(field: str, message: generation_pb2.ChatMessage) -> None:
    role = message.role
    if role not in ROLES:
        raise rpc.invalid(
            f"{field}.role", f"{field}.role must be one of {', '.join(ROLES)}; got {role[:64]!r}"
        )
    if message.parts and message.content:
        raise rpc.invalid(f"{field}.parts", f"{field}.parts excludes content; set only one of them")
    common.check_count(f"{field}.parts", len(message.parts), common.MAX_PARTS)
    for i, part in enumerate(message.parts):
        name = f"{field}.parts[{i}]"
        if part.WhichOneof("part") is None:
            raise rpc.invalid(name, f"{name} must be text or an image")
        if part.HasField("image") and role != "user":
            raise rpc.invalid(
                f"{name}.image", f"{name}.image belongs to messages of role 'user'; got {role!r}"
            )
        if part.image.detail not in DETAILS:
            raise rpc.invalid(
                f"{name}.image.detail",
                f"{name}.image.detail must be auto, low or high; got {part.image.detail[:64]!r}",
            )
    allowed = {"assistant": ("tool_calls", "reasoning"), "tool": ("tool_call_id",)}
    for of, names in allowed.items():
        for name in names:
            if role != of and getattr(message, name):
                raise rpc.invalid(
                    f"{field}.{name}", f"{field}.{name} belongs to messages of role {of!r}"
                )
    for i, call in enumerate(message.tool_calls):
        check_call(f"{field}.tool_calls[{i}]", call)


def output_length(
    request: generation_pb2.GenerateRequest,
    prompt_tokens: int,
    limits: Limits,
    default: int | None = None,
) -> int:
    """Check lengths with `octavo.common.limits.output_length`.

    Args:
        request: The request.
        prompt_tokens: Number of prompt tokens.
        limits: The model's limits.
        default: The model's default max_tokens, if any.

    Returns:
        Maximum tokens per output.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT if the request can never be served.
    """
    room = common.output_length(prompt_tokens, num_outputs(request), request.stop, limits)
    if default is None or request.stop.HasField("max_tokens"):
        return room
    return min(room, max(default, request.stop.min_tokens))


def num_outputs(request: generation_pb2.GenerateRequest) -> int:
    """Return the number of outputs, each a sequence on the engine."""
    if request.HasField("beam"):
        return request.beam.width
    return request.sampling.n if request.sampling.HasField("n") else 1


def _check_prompt(request: generation_pb2.GenerateRequest, limits: Limits) -> None:
    check_chat(request, limits)
    kind = request.WhichOneof("prompt")
    if kind == "text" and not (request.text or request.suffix):
        raise rpc.invalid("text", "text must have at least one character")
    if kind == "tokens":
        token_ids = request.tokens.token_ids
        if not token_ids:
            raise rpc.invalid("tokens.token_ids", "tokens.token_ids must hold at least one token")
        # A longer one is rejected by `output_length`.
        if len(token_ids) < limits.max_model_len or request.HasField("truncate_prompt_tokens"):
            check_token_ids("tokens.token_ids", token_ids, limits.vocab_size)
    if request.suffix:
        if kind != "text":
            raise rpc.invalid("suffix", "suffix needs a prompt of text, which comes before it")
        if request.HasField("truncate_prompt_tokens"):
            raise rpc.invalid("suffix", "suffix excludes truncate_prompt_tokens")


def kept_tokens(request: generation_pb2.GenerateRequest, limits: Limits) -> int | None:
    """Return how many of its prompt's last tokens a request keeps; None: all."""
    if not request.HasField("truncate_prompt_tokens"):
        return None
    output = 1 if request.stop.fit_limits else max(request.stop.max_tokens, 1)
    return request.truncate_prompt_tokens or max(limits.max_model_len - output, 1)


def check_vocabulary(
    request: generation_pb2.GenerateRequest,
    token_ids: Sequence[int],
    pieces: Pieces,
    limits: Limits,
) -> None:
    """Check that the model has all tokens that its tokenizer produced.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT, with the token's text.
    """
    if max(token_ids, default=0) < limits.vocab_size:
        return
    field = "chat.messages" if request.WhichOneof("prompt") == "chat" else "text"
    token_id = next(each for each in token_ids if each >= limits.vocab_size)
    raise rpc.invalid(
        field,
        f"{field} must not spell {pieces.spelling(token_id)!r}: it is token {token_id} of the"
        f" tokenizer, but the model has only the tokens [0, {limits.vocab_size - 1}]",
    )
