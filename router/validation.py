"""What a request may ask for: every limit, with the message that states it.

Nothing here waits or looks at an engine's state: a request that is refused
would be refused at any time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.common import rpc
from octavo.v1 import generation_pb2, sampling_pb2

MAX_REQUEST_ID = 128
MAX_PRIORITY = 100
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_TOKENS = 256
MAX_LOGPROBS = 20
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engines of one model can take.

    Attributes:
        max_model_len: Most tokens of prompt and output together.
        vocab_size: Token ids are below this.
        max_outputs: Most outputs of one request.
        block_size: Tokens per KV-cache block.
        total_blocks: KV-cache blocks of an engine.
        beam_search: Whether beam search is offered.
    """

    max_model_len: int
    vocab_size: int
    max_outputs: int
    block_size: int
    total_blocks: int
    beam_search: bool


PromptRequest = generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest


def check_request_id(request_id: str) -> None:
    """Raises INVALID_ARGUMENT unless the id is empty or fit for logs and metadata."""
    visible = all("!" <= c <= "~" for c in request_id)
    if len(request_id) > MAX_REQUEST_ID or not visible:
        raise rpc.invalid(
            "request_id",
            f"request_id must be at most {MAX_REQUEST_ID} characters of visible ASCII, "
            "without spaces",
        )


def check_request(request: generation_pb2.GenerateRequest, limits: Limits) -> None:
    """Checks all that can be checked before the prompt is in tokens.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT, or UNIMPLEMENTED for beam search where
            there is none; the field is named.
    """
    check_request_id(request.request_id)
    _number("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_prompt(request, limits)
    _check_beam(request, limits)
    _check_sampling(request.sampling, limits)
    _check_stop(request.stop, limits)
    for name in ("logprobs", "prompt_logprobs"):
        _number(f"output.{name}", getattr(request.output, name), 0, MAX_LOGPROBS)


def check_chat(request: PromptRequest) -> None:
    """Checks that a prompt is set and that a chat has messages of known roles."""
    if request.WhichOneof("prompt") is None:
        raise rpc.invalid("prompt", "a prompt must be set")
    if request.WhichOneof("prompt") != "chat":
        return
    if not request.chat.messages:
        raise rpc.invalid("chat.messages", "chat.messages must hold at least one message")
    for i, message in enumerate(request.chat.messages):
        if message.role not in ROLES:
            field = f"chat.messages[{i}].role"
            raise rpc.invalid(
                field, f"{field} must be one of {', '.join(ROLES)}; got {message.role[:64]!r}"
            )


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Checks that every id is in the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        i, token_id = next((i, t) for i, t in enumerate(token_ids) if t >= vocab_size)
        raise rpc.invalid(
            f"{field}[{i}]", f"{field}[{i}] must be in [0, {vocab_size - 1}]; got {token_id}"
        )


def output_length(
    request: generation_pb2.GenerateRequest, prompt_tokens: int, limits: Limits
) -> int:
    """Checks the prompt's and the outputs' lengths against the context and the memory.

    Returns:
        The most tokens that each output may have: as asked for, else all that
        the context and the engine's blocks leave.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT for what could never be served.
    """
    room = limits.max_model_len - prompt_tokens
    if prompt_tokens == 0:
        raise rpc.invalid("prompt", "the prompt must have at least one token; it has none")
    if room < 1:
        raise rpc.invalid(
            "prompt",
            f"the prompt must have at most {limits.max_model_len - 1} tokens, which leaves one "
            f"of the model's {limits.max_model_len} for the output; it has {prompt_tokens}",
        )
    outputs = num_outputs(request)
    fits = _fitting_output(prompt_tokens, outputs, limits)
    if fits < 1:
        raise rpc.invalid(
            "prompt",
            f"a prompt of {prompt_tokens} tokens with {outputs} output(s) could never fit: the "
            f"engine has {limits.total_blocks} KV-cache blocks of {limits.block_size} tokens",
        )
    max_tokens = request.stop.max_tokens if request.stop.HasField("max_tokens") else min(room, fits)
    if max_tokens > room:
        raise rpc.invalid(
            "stop.max_tokens",
            f"stop.max_tokens must be in [1, {room}]: the model's {limits.max_model_len} tokens "
            f"less the prompt's {prompt_tokens}; got {max_tokens}",
        )
    if max_tokens > fits:
        raise rpc.invalid(
            "stop.max_tokens",
            f"stop.max_tokens must be in [1, {fits}] to fit, with this prompt and {outputs} "
            f"output(s), in the engine's {limits.total_blocks} KV-cache blocks of "
            f"{limits.block_size} tokens; got {max_tokens}",
        )
    if request.stop.min_tokens > max_tokens:
        raise rpc.invalid(
            "stop.min_tokens",
            f"stop.min_tokens must be in [0, {max_tokens}], the most tokens of the output; "
            f"got {request.stop.min_tokens}",
        )
    return max_tokens


def num_outputs(request: generation_pb2.GenerateRequest) -> int:
    """Returns how many outputs, each a sequence in the engine, a request asks for."""
    if request.HasField("beam"):
        return request.beam.width
    return request.sampling.n if request.sampling.HasField("n") else 1


def _fitting_output(prompt_tokens: int, outputs: int, limits: Limits) -> int:
    """Returns the most tokens per output that an engine has blocks for.

    Outputs share the prompt's full blocks. The last token drawn is never
    computed on, so it needs no place.
    """
    shared, rest = divmod(prompt_tokens, limits.block_size)
    own_blocks = (limits.total_blocks - shared) // outputs
    return own_blocks * limits.block_size - rest + 1


def _check_prompt(request: generation_pb2.GenerateRequest, limits: Limits) -> None:
    check_chat(request)
    kind = request.WhichOneof("prompt")
    if kind == "text" and not request.text:
        raise rpc.invalid("text", "text must have at least one character")
    if kind == "tokens":
        token_ids = request.tokens.token_ids
        if not token_ids:
            raise rpc.invalid("tokens.token_ids", "tokens.token_ids must hold at least one token")
        if len(token_ids) < limits.max_model_len:  # else `output_length` refuses it
            check_token_ids("tokens.token_ids", token_ids, limits.vocab_size)


def _check_beam(request: generation_pb2.GenerateRequest, limits: Limits) -> None:
    if not request.HasField("beam"):
        return
    if request.HasField("sampling"):
        raise rpc.invalid("beam", "beam excludes sampling; set only one of them")
    if not limits.beam_search:
        raise rpc.unimplemented("beam", "the model's engine does not do beam search; use sampling")
    _number("beam.width", request.beam.width, 1, limits.max_outputs)
    if not math.isfinite(request.beam.length_penalty):
        raise rpc.invalid("beam.length_penalty", "beam.length_penalty must be finite")


def _check_sampling(sampling: sampling_pb2.SamplingParams, limits: Limits) -> None:
    if sampling.HasField("temperature"):
        _number("sampling.temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    if sampling.HasField("top_p"):
        _number("sampling.top_p", sampling.top_p, 0, 1, above=True)
    _number("sampling.min_p", sampling.min_p, 0, 1)
    if sampling.HasField("repetition_penalty"):
        _number(
            "sampling.repetition_penalty",
            sampling.repetition_penalty,
            0,
            MAX_REPETITION_PENALTY,
            above=True,
        )
    for name in ("presence_penalty", "frequency_penalty"):
        _number(f"sampling.{name}", getattr(sampling, name), -MAX_PENALTY, MAX_PENALTY)
    if sampling.HasField("n"):
        _number("sampling.n", sampling.n, 1, limits.max_outputs)
    _count("sampling.logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES)
    for token_id, bias in sampling.logit_bias.items():
        field = f"sampling.logit_bias[{token_id}]"
        if token_id >= limits.vocab_size:
            raise rpc.invalid(
                field,
                f"token ids in sampling.logit_bias must be in [0, {limits.vocab_size - 1}]; "
                f"got {token_id}",
            )
        _number(field, bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_stop(stop: sampling_pb2.StopConditions, limits: Limits) -> None:
    if stop.HasField("max_tokens"):
        if stop.max_tokens == 0:
            raise rpc.invalid(
                "stop.max_tokens",
                f"stop.max_tokens must be in [1, {limits.max_model_len - 1}], less the prompt's "
                "tokens; got 0",
            )
        if stop.min_tokens > stop.max_tokens:
            raise rpc.invalid(
                "stop.min_tokens",
                f"stop.min_tokens must be in [0, {stop.max_tokens}], up to stop.max_tokens; "
                f"got {stop.min_tokens}",
            )
    _count("stop.strings", len(stop.strings), MAX_STOP_STRINGS)
    for i, string in enumerate(stop.strings):
        if not 1 <= len(string) <= MAX_STOP_STRING_LENGTH:
            field = f"stop.strings[{i}]"
            raise rpc.invalid(
                field,
                f"{field} must have 1 to {MAX_STOP_STRING_LENGTH} characters; it has {len(string)}",
            )
    _count("stop.token_ids", len(stop.token_ids), MAX_STOP_TOKENS)
    check_token_ids("stop.token_ids", stop.token_ids, limits.vocab_size)


def _number(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Checks that `value` is in [low, high], or (low, high] if `above`. NaN never is."""
    if (value > low if above else value >= low) and value <= high:
        return
    bracket = "(" if above else "["
    raise rpc.invalid(field, f"{field} must be in {bracket}{low:g}, {high:g}]; got {value:g}")


def _count(field: str, count: int, most: int) -> None:
    if count > most:
        raise rpc.invalid(field, f"{field} may have at most {most} entries; it has {count}")
