"""Limits of requests, and their error messages.

The router checks them to answer at once; the engine checks them again, as it trusts no router. Both
call `check_parameters` once, and `output_length` once the prompt is tokenized. No check depends on
state: an invalid request is always invalid.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import Message

from octavo.common import rpc
from octavo.common.kv_cache.layer_groups import BlockBudget
from octavo.common.sampling_parameters import MAX_PRIORITY, set_values
from octavo.v1 import engine_pb2, generation_pb2, sampling_pb2

MAX_REQUEST_ID = 128
MAX_CACHE_SALT = 128
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_ALLOWED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
MAX_BAD_WORD_TOKENS = 2048
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_TOKENS = 256
MAX_CONSTRAINT_BYTES = 1 << 20
MAX_CHOICES = 1024
MAX_TOOLS = 128
MAX_TOOL_NAME = 128
MAX_PARTS = 1024
MAX_IMAGES = 64
MAX_TEXTS = 2048


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the engines of one model.

    Attributes:
        max_model_len: Maximum tokens of prompt and output together.
        vocab_size: Exclusive upper limit of token ids.
        max_outputs: Maximum outputs per request.
        budgets: Block budget of each engine; a request must fit into every one.
        beam_search: Whether the engines support beam search.
        constraints: Whether the engines can constrain outputs.
        images: Whether prompts may have images.
    """

    max_model_len: int
    vocab_size: int
    max_outputs: int
    budgets: tuple[BlockBudget, ...]
    beam_search: bool
    constraints: bool = False
    images: bool = False


def check_parameters(
    request: generation_pb2.GenerateRequest | engine_pb2.Submit, limits: Limits
) -> None:
    """Check all of a request except its prompt.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT, or UNIMPLEMENTED for what the engines do not support, with
            the field's name.
    """
    _check_length("request_id", request.request_id, MAX_REQUEST_ID)
    _check_length("cache_salt", request.cache_salt, MAX_CACHE_SALT)
    check_number("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.HasField("beam"):
        _check_beam(request.beam, request.stop, request.output, limits)
        if request.bad_words:
            raise rpc.invalid("bad_words", "bad_words must be empty with beam search")
    check_sampling(request.sampling, limits)
    check_stop(request.stop, limits)
    _check_ranges("output", request.output, limits)
    if request.HasField("constraint"):
        check_constraint(request.constraint, limits)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Check that every id is in the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        i, token_id = next((i, t) for i, t in enumerate(token_ids) if t >= vocab_size)
        raise rpc.invalid(
            f"{field}[{i}]", f"{field}[{i}] must be in [0, {vocab_size - 1}]; got {token_id}"
        )


def check_sampling(sampling: sampling_pb2.SamplingParams, limits: Limits) -> None:
    """Check the sampling parameters."""
    _check_ranges("sampling", sampling, limits)
    check_count("sampling.logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES)
    for token_id, bias in sampling.logit_bias.items():
        field = f"sampling.logit_bias[{token_id}]"
        if token_id >= limits.vocab_size:
            raise rpc.invalid(
                field,
                f"token ids in sampling.logit_bias must be in [0, {limits.vocab_size - 1}]; "
                f"got {token_id}",
            )
        check_number(field, bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    field = "sampling.allowed_token_ids"
    check_count(field, len(sampling.allowed_token_ids), MAX_ALLOWED_TOKENS)
    check_token_ids(field, sampling.allowed_token_ids, limits.vocab_size)


def check_stop(stop: sampling_pb2.StopConditions, limits: Limits) -> None:
    """Check the stop conditions that do not depend on the prompt's length."""
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
        if stop.max_reasoning_tokens > stop.max_tokens and not stop.fit_limits:
            raise rpc.invalid(
                "stop.max_reasoning_tokens",
                f"stop.max_reasoning_tokens must be in [0, {stop.max_tokens}], up to "
                f"stop.max_tokens; got {stop.max_reasoning_tokens}",
            )
    check_texts("stop.strings", stop.strings, MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH)
    check_count("stop.token_ids", len(stop.token_ids), MAX_STOP_TOKENS)
    check_token_ids("stop.token_ids", stop.token_ids, limits.vocab_size)


def _check_beam(
    beam: sampling_pb2.BeamSearchParams,
    stop: sampling_pb2.StopConditions,
    output: sampling_pb2.OutputOptions,
    limits: Limits,
) -> None:
    """Check a beam search, and that options that it does not support are unset."""
    if not limits.beam_search:
        raise rpc.unimplemented(
            "beam", "the model's engine does not support beam search; use sampling"
        )
    _check_ranges("beam", beam, limits)
    if stop.strings:
        raise rpc.invalid("stop.strings", "stop.strings must be empty with beam search")
    for name in ("logprobs", "prompt_logprobs"):
        if output.HasField(name):
            field = f"output.{name}"
            raise rpc.invalid(field, f"{field} must not be set with beam search")


def check_constraint(constraint: sampling_pb2.OutputConstraint, limits: Limits) -> None:
    """Check a constraint's kind and size; the engine compiles it later."""
    if not limits.constraints:
        raise rpc.unimplemented(
            "constraint",
            "the model's engine cannot constrain outputs: it needs the model's tokenizer, and "
            "end-of-sequence tokens",
        )
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise rpc.invalid("constraint", "constraint must have one kind set, such as json_schema")
    field = f"constraint.{kind}"
    size = constraint.ByteSize()
    if size > MAX_CONSTRAINT_BYTES:
        raise rpc.invalid(
            field, f"{field} must have at most {MAX_CONSTRAINT_BYTES} bytes; it has {size}"
        )
    if constraint.lenient and kind != "json_schema":
        raise rpc.invalid("constraint.lenient", "constraint.lenient needs constraint.json_schema")
    if kind == "json_object" and not constraint.json_object:
        raise rpc.invalid(field, f"{field} must be true, or not set")
    if kind == "choices":
        values = constraint.choices.values
        check_count(f"{field}.values", len(values), MAX_CHOICES)
        if not values or not all(values):
            raise rpc.invalid(
                f"{field}.values", f"{field}.values must have at least one text, and none empty"
            )
    elif kind != "json_object" and not getattr(constraint, kind):
        raise rpc.invalid(field, f"{field} must not be empty")


def output_length(
    prompt_tokens: int, outputs: int, stop: sampling_pb2.StopConditions, limits: Limits
) -> int:
    """Return the maximum tokens per output: requested, or else limited by context and blocks.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT: the request could never be served.
    """
    room = limits.max_model_len - prompt_tokens
    if prompt_tokens == 0:
        raise rpc.invalid("prompt", "the prompt must have at least one token; it has none")
    if room < 1:
        raise prompt_too_long(limits.max_model_len - 1, prompt_tokens)
    budget = min(limits.budgets, key=lambda one: one.fitting_output(prompt_tokens, outputs, room))
    fits = budget.fitting_output(prompt_tokens, outputs, room)
    if fits < 1:
        raise rpc.invalid(
            "prompt",
            f"a prompt of {prompt_tokens} tokens with {outputs} output(s) could never fit: the "
            f"engine has {budget.total_blocks} KV-cache blocks of {budget.block_size} tokens",
            reason=rpc.CONTEXT_LENGTH_EXCEEDED,
        )
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else min(room, fits)
    if stop.fit_limits:
        max_tokens = min(max_tokens, room, fits)
    if max_tokens > room:
        raise rpc.invalid(
            "stop.max_tokens",
            f"stop.max_tokens must be in [1, {room}]: the model's {limits.max_model_len} tokens "
            f"less the prompt's {prompt_tokens}; got {max_tokens}",
            reason=rpc.CONTEXT_LENGTH_EXCEEDED,
        )
    if max_tokens > fits:
        raise rpc.invalid(
            "stop.max_tokens",
            f"stop.max_tokens must be in [1, {fits}] to fit, with this prompt and {outputs} "
            f"output(s), in the engine's {budget.total_blocks} KV-cache blocks of "
            f"{budget.block_size} tokens; got {max_tokens}",
            reason=rpc.CONTEXT_LENGTH_EXCEEDED,
        )
    if stop.min_tokens > max_tokens:
        raise rpc.invalid(
            "stop.min_tokens",
            f"stop.min_tokens must be in [0, {max_tokens}], the output's maximum; "
            f"got {stop.min_tokens}",
            reason=rpc.CONTEXT_LENGTH_EXCEEDED,
        )
    return max_tokens


def prompt_too_long(max_tokens: int, tokens: int | None = None) -> rpc.RpcError:
    """Return the error for a prompt over `max_tokens`; `tokens` is None if unknown."""
    return rpc.invalid(
        "prompt",
        f"the prompt must have at most {max_tokens} tokens, which leaves one of the model's "
        f"{max_tokens + 1} for the output; it has {'more' if tokens is None else tokens}",
        reason=rpc.CONTEXT_LENGTH_EXCEEDED,
    )


def check_number(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Check that `value` is in [low, high], or (low, high] if `above`. NaN is invalid."""
    if (value > low if above else value >= low) and value <= high:
        return
    bracket = "(" if above else "["
    raise rpc.invalid(field, f"{field} must be in {bracket}{low:g}, {high:g}]; got {value:g}")


def _check_ranges(name: str, message: Message, limits: Limits) -> None:
    """Check the numbers in a message of GenerateRequest against their declared ranges."""
    for _, parameter, value in set_values(message, name):
        allowed = parameter.range
        if allowed is not None:
            high = limits.max_outputs if allowed.high == "max_outputs" else allowed.high
            check_number(parameter.path, value, allowed.low, high, above=allowed.above)


def _check_length(field: str, text: str, maximum: int) -> None:
    if len(text) > maximum:
        raise rpc.invalid(
            field, f"{field} must be at most {maximum} characters; it has {len(text)}"
        )


def check_texts(field: str, texts: Sequence[str], maximum: int, length: int) -> None:
    """Check the number of texts, and that each has 1 to `length` characters."""
    check_count(field, len(texts), maximum)
    for i, text in enumerate(texts):
        if not 1 <= len(text) <= length:
            raise rpc.invalid(
                f"{field}[{i}]",
                f"{field}[{i}] must have 1 to {length} characters; it has {len(text)}",
            )


def check_count(field: str, count: int, maximum: int) -> None:
    """Check the number of entries of a field."""
    if count > maximum:
        raise rpc.invalid(field, f"{field} may have at most {maximum} entries; it has {count}")
