"""Conversion of clients' arguments to requests, sync and asyncio."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as Protobuf

from octavo.client.checks import checked, invalid
from octavo.client.prompts import Prompt, set_prompt, set_tool_choice, set_tools
from octavo.common.sampling_parameters import PARAMETERS, ChatOptions, GenerateOptions
from octavo.common.tools import schema_text
from octavo.v1 import generation_pb2 as pb

HIGHEST = {
    FieldDescriptor.CPPTYPE_UINT32: (1 << 32) - 1,
    FieldDescriptor.CPPTYPE_UINT64: (1 << 64) - 1,
}
"""Maximum of each unsigned type."""
LOWEST = {"stop.max_tokens": 1}
"""Minimum of fields that must not be 0."""


Texts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""One text or several, as strings or token ids."""


class TextsOptions(TypedDict, total=False):
    """Options of requests about whole texts.

    Attributes:
        model: Name of the model; needed if several are served.
        truncate: Whether to cut texts that are too long, which else are refused.
        priority: Requests of higher priority run first, -100 to 100.
        request_id: The request's id. Default: a random one.
    """

    model: str | None
    truncate: bool
    priority: int
    request_id: str


class EmbedOptions(TextsOptions, total=False):
    """Options of `embed` besides the texts and those of `TextsOptions`.

    Attributes:
        dimensions: Number of leading dimensions to return, if the model was trained for that.
            Default: all.
        prompt_name: Name of the model's prompt that is put before each text; "" for none. Default:
            the model's default.
    """

    dimensions: int | None
    prompt_name: str | None


class ScoreOptions(TextsOptions, total=False):
    """Options of `score` and `classify` besides the texts and those of `TextsOptions`.

    Attributes:
        raw: Whether scores are logits, without the model's own activation.
    """

    raw: bool


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Build a GenerateRequest; the server checks the ranges.

    Raises:
        InvalidArgumentError: A value does not fit its field's type, such as a negative `top_k`, or
            several options set a constraint.
        TypeError: An option is unknown or the prompt is not text, a chat or token ids.
    """
    request = pb.GenerateRequest()
    set_prompt(request, prompt)
    for name, value in options.items():
        if name not in PARAMETERS:
            raise TypeError(f"generate() has no option {name!r}")
        _set_option(request, name, value)
    return request


def tokenize_request(
    prompt: Prompt,
    model: str | None,
    options: ChatOptions | None = None,
    add_special_tokens: bool | None = None,
) -> pb.TokenizeRequest:
    """Build a TokenizeRequest from text or a chat.

    Raises:
        InvalidArgumentError: A value does not fit its field's type, or chat options are given with
            text.
        TypeError: An option is unknown or the prompt is not text or a chat.
    """
    request = pb.TokenizeRequest(model=model or "", add_special_tokens=add_special_tokens)
    set_prompt(request, prompt)
    for name, value in (options or {}).items():
        if name not in get_type_hints(ChatOptions):
            raise TypeError(f"tokenize() has no option {name!r}")
        _set_option(request, name, value)
    return request


def detokenize_request(
    token_ids: Sequence[int], model: str | None, keep_special_tokens: bool
) -> pb.DetokenizeRequest:
    """Build a DetokenizeRequest."""
    request = pb.DetokenizeRequest(model=model or "", keep_special_tokens=keep_special_tokens)
    _set(request, "token_ids", token_ids)
    return request


def embed_request(texts: Texts, **options: Unpack[EmbedOptions]) -> pb.EmbedRequest:
    """Build an EmbedRequest from one text or several, as strings or token ids.

    Raises:
        InvalidArgumentError: A value does not fit its field's type.
        TypeError: An option is unknown.
    """
    request = pb.EmbedRequest()
    _set_texts(request, texts)
    _set_known(request, "embed", EmbedOptions, options)
    return request


def score_request(
    query: str | Sequence[str], documents: str | Sequence[str], **options: Unpack[ScoreOptions]
) -> pb.ScoreRequest:
    """Build a ScoreRequest from one query, or one for each document; see `embed_request`."""
    request = pb.ScoreRequest()
    _set(request, "queries", query)
    _set(request, "documents", documents)
    _set_known(request, "score", ScoreOptions, options)
    return request


def classify_request(
    texts: Texts, second_texts: str | Sequence[str] = (), **options: Unpack[ScoreOptions]
) -> pb.ClassifyRequest:
    """Build a ClassifyRequest from one text or several, or from pairs; see `embed_request`."""
    request = pb.ClassifyRequest()
    _set_texts(request, texts)
    _set(request, "second_texts", second_texts)
    _set_known(request, "classify", ScoreOptions, options)
    return request


def _set_known(request: Protobuf, method: str, kind: type, options: Mapping[str, object]) -> None:
    """Set the options of a kind that are not None."""
    known = get_type_hints(kind)
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"{method}() has no option {name!r}")
        if value is not None:
            _set(request, name, value)


def _set_texts(request: pb.EmbedRequest | pb.ClassifyRequest, texts: Texts) -> None:
    """Set one text or several, as strings or token ids."""
    one = isinstance(texts, str) or (texts and isinstance(texts[0], int))
    several: Sequence[Any] = [texts] if one else texts
    if several and isinstance(several[0], str):
        _set(request, "texts", several)
        return
    for number, token_ids in enumerate(several):
        with checked(f"tokens[{number}].token_ids"):
            request.tokens.add().token_ids.extend(token_ids)


def _set_option(request: Any, name: str, value: Any) -> None:  # noqa: ANN401 - the table has types
    """Set an option that is not None."""
    if value is None:
        return
    path = PARAMETERS[name].path
    if path.startswith("chat.") and request.WhichOneof("prompt") != "chat":
        raise invalid(path, f"{name} needs a prompt of messages: it sets how a chat is rendered")
    if path.startswith("constraint.") and path != "constraint.lenient":
        if path == "constraint.json_object" and not value:
            return
        _check_only_constraint(request, name, path)
    match path:
        case "chat.tools":
            set_tools(request.chat, value)
        case "chat.tool_choice":
            set_tool_choice(request.chat, value)
        case "constraint.json_schema":
            with checked(path):
                request.constraint.json_schema = schema_text(value)
        case "constraint.choices.values":
            request.constraint.choices.SetInParent()  # also if empty, for an error
            with checked(path):
                request.constraint.choices.values.extend(value)
        case _:
            _set(request, path, value)


def _check_only_constraint(request: pb.GenerateRequest, name: str, path: str) -> None:
    """Reject a second constraint, as protobuf would replace the first."""
    if (other := request.constraint.WhichOneof("kind")) is not None:
        raise invalid(path, f"{name} and {other} exclude each other: an output has one constraint")


def _set(request: Protobuf, path: str, value: object) -> None:
    """Set the scalar, repeated or map field at `path`."""
    *parents, name = path.split(".")
    target = request
    for parent in parents:
        target = getattr(target, parent)
    if isinstance(value, int):
        _check_integer(path, value, target.DESCRIPTOR.fields_by_name[name].cpp_type)
    with checked(path):
        if isinstance(value, Mapping):
            getattr(target, name).update(value)
        elif isinstance(getattr(target, name), str | int | float):
            setattr(target, name, value)
        else:
            getattr(target, name).extend([value] if isinstance(value, str) else value)


def _check_integer(path: str, value: int, cpp_type: int) -> None:
    """Reject a number outside the range of an unsigned field, naming the range."""
    low, high = LOWEST.get(path, 0), HIGHEST.get(cpp_type)
    if high is not None and not 0 <= value <= high:
        raise invalid(path, f"{path} must be in [{low}, {high}]; got {value}")
