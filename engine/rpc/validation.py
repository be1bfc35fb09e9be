"""Converts a router's Submit to a request, or raises an error that names the invalid field."""

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Protocol

import numpy as np
from google.protobuf.duration_pb2 import Duration

from octavo.common import rpc
from octavo.common.kv_cache.prefix_hash import ImageSpan, prefix_salt
from octavo.common.limits import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    Limits,
    check_count,
    check_parameters,
    check_token_ids,
    output_length,
)
from octavo.common.sampling_parameters import set_values
from octavo.common.tracing import CONTEXT_FIELDS
from octavo.engine.constraints.constraint import Constraint, ConstraintKind
from octavo.engine.kv_disk.read_ahead import Prefetch
from octavo.engine.scheduling.request import (
    BeamSearch,
    PromptImage,
    Request,
    RequestAdapter,
    Resumption,
)
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.v1 import engine_pb2, sampling_pb2

FindAdapter = Callable[[str], RequestAdapter | None]
NO_IMAGES: Mapping[bytes, Mapping[str, np.ndarray]] = {}


class ImageTokens(Protocol):
    """How a model's prompts have images."""

    image_token_id: int
    reach: int | None
    longest: int | None

    def rotary_positions(
        self, prompt: Sequence[int], images: Sequence[PromptImage]
    ) -> np.ndarray | None:
        """Return `Request.rotary` of a prompt."""


MAX_NUMBER = (1 << 64) - 1
"""Maximum number of an output in its session."""
MAX_ADDRESS = 256
"""Maximum characters of an engine's address."""
_SAMPLING = {field.name for field in fields(SamplingParams)}


def to_request(
    submit: engine_pb2.Submit,
    *,
    session: int,
    limits: Limits,
    eos_token_ids: Collection[int],
    find_adapter: FindAdapter = lambda _: None,
    images: Mapping[bytes, Mapping[str, np.ndarray]] = NO_IMAGES,
    vision: ImageTokens | None = None,
) -> Request:
    """Check a Submit and convert it to a request.

    Args:
        submit: The message.
        session: Number of its router's session.
        limits: The engine's limits.
        eos_token_ids: The tokens that end an output.
        find_adapter: Returns the loaded adapter of a name; None if there is none.
        images: The images that were sent for it, by digest.
        vision: How the model's prompts have images; None if they have none.

    Raises:
        RpcError: This engine can never serve the request.
    """
    adapter = _adapter(submit.adapter, find_adapter)
    check_parameters(submit, limits)
    prompt = tuple(submit.prompt_token_ids)
    check_token_ids("prompt_token_ids", prompt, limits.vocab_size)
    placed = _images(submit, prompt, images, vision)
    beam = _beam(submit.beam) if submit.HasField("beam") else None
    constraint = _constraint(submit.constraint) if submit.HasField("constraint") else None
    sampling = _sampling(submit.sampling, submit.output)
    outputs = beam.width if beam else sampling.n
    max_tokens = output_length(len(prompt), outputs, submit.stop, limits)
    if beam and submit.resume:
        raise rpc.invalid("resume", "resume must be empty with beam search")
    resume = _resume(submit.resume, outputs, max_tokens, limits)
    bad_words = _bad_words(submit.bad_words, limits)
    if submit.first_number + outputs > MAX_NUMBER:
        raise rpc.invalid(
            "first_number",
            f"first_number must be at most {MAX_NUMBER - outputs} with {outputs} outputs; "
            f"got {submit.first_number}",
        )
    if len(submit.kv_source) > MAX_ADDRESS:
        raise rpc.invalid("kv_source", f"kv_source must have at most {MAX_ADDRESS} characters")
    stop = submit.stop
    goes_on = stop.ignore_eos and constraint is None
    now = time.monotonic()
    timeout = _seconds(submit.timeout) if submit.HasField("timeout") else None
    return Request(
        session=session,
        request_id=submit.request_id,
        prompt=prompt,
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=stop.min_tokens,
        eos_token_ids=frozenset() if goes_on else frozenset(eos_token_ids),
        stop_token_ids=frozenset(stop.token_ids),
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        arrival=now,
        deadline=None if timeout is None else now + timeout,
        beam=beam,
        resume=resume,
        trace_context={
            key: submit.trace_context[key] for key in CONTEXT_FIELDS if key in submit.trace_context
        },
        constraint=constraint,
        ignore_eos=stop.ignore_eos,
        adapter=adapter,
        first_number=submit.first_number,
        kv_source=submit.kv_source,
        bad_words=bad_words,
        images=placed,
        rotary=vision.rotary_positions(prompt, placed) if placed and vision is not None else None,
    )


def to_prefetch(
    message: engine_pb2.PrefetchBlocksRequest,
    *,
    limits: Limits,
    find_adapter: FindAdapter = lambda _: None,
) -> Prefetch:
    """Check and convert a PrefetchBlocksRequest.

    Raises:
        RpcError: This engine can never have such a prompt.
    """
    adapter = _adapter(message.adapter, find_adapter)
    count = len(message.prompt_token_ids)
    if not 1 <= count <= limits.max_model_len:
        raise rpc.invalid(
            "prompt_token_ids",
            f"prompt_token_ids must be 1 to {limits.max_model_len} tokens; got {count}",
        )
    check_token_ids("prompt_token_ids", message.prompt_token_ids, limits.vocab_size)
    if not 1 <= len(message.kv_source) <= MAX_ADDRESS:
        raise rpc.invalid("kv_source", f"kv_source must have 1 to {MAX_ADDRESS} characters")
    salt = prefix_salt(message.cache_salt, "" if adapter is None else adapter.digest)
    return Prefetch(tuple(message.prompt_token_ids), salt, message.kv_source)


def _images(
    submit: engine_pb2.Submit,
    prompt: tuple[int, ...],
    images: Mapping[bytes, Mapping[str, np.ndarray]],
    vision: ImageTokens | None,
) -> tuple[PromptImage, ...]:
    """Check and convert a prompt's images.

    Args:
        submit: The message.
        prompt: The prompt.
        images: The images that were sent for it, by digest.
        vision: How the model's prompts have images; None if they have none.
    """
    if submit.images and vision is None:
        raise rpc.invalid("images", "images must be empty: the model reads none here")
    placed, before = list[PromptImage](), 0
    for i, image in enumerate(submit.images):
        assert vision is not None
        field = f"images[{i}]"
        if not before <= image.start < image.end < len(prompt):
            raise rpc.invalid(
                field,
                f"{field} must have 1 or more tokens in [{before}, {len(prompt) - 2}]; got"
                f" [{image.start}, {image.end})",
            )
        if vision.reach is not None and image.end > vision.reach:
            raise rpc.invalid(
                field,
                f"{field} must end within the first {vision.reach} tokens of the prompt, which all"
                f" layers of this model see; it ends at {image.end}",
            )
        if vision.longest is not None and image.end - image.start > vision.longest:
            raise rpc.invalid(
                field,
                f"{field} may have at most {vision.longest} tokens, as many as a step computes; it"
                f" has {image.end - image.start}",
            )
        if image.digest not in images:
            raise rpc.invalid(f"{field}.digest", f"{field}.digest names an image that was not sent")
        before = image.end
        span = ImageSpan(image.start, image.end, image.digest)
        (places,) = np.nonzero(np.array(prompt[span.start : span.end]) == vision.image_token_id)
        placed.append(PromptImage(span, places + span.start, images[span.digest]))
    return tuple(placed)


def _adapter(name: str, find_adapter: FindAdapter) -> RequestAdapter | None:
    """Return the adapter of a name; None for an empty one."""
    adapter = find_adapter(name) if name else None
    if name and adapter is None:
        raise rpc.not_found("model", f"model {name[:128]!r} is not served here any more")
    return adapter


def _resume(
    entries: Iterable[engine_pb2.Resume], outputs: int, max_tokens: int, limits: Limits
) -> dict[int, Resumption]:
    """Check and convert the tokens that other engines sampled, by output."""
    resume: dict[int, Resumption] = {}
    for i, entry in enumerate(entries):
        if entry.index >= outputs or entry.index in resume:
            raise rpc.invalid(
                f"resume[{i}].index",
                f"resume[{i}].index must be in [0, {outputs - 1}] and named once; "
                f"got {entry.index}",
            )
        if len(entry.token_ids) >= max_tokens and not entry.finished:
            raise rpc.invalid(
                f"resume[{i}].token_ids",
                f"resume[{i}].token_ids must be fewer than the {max_tokens} that the output may "
                f"have; there are {len(entry.token_ids)}",
            )
        check_token_ids(f"resume[{i}].token_ids", entry.token_ids, limits.vocab_size)
        resume[entry.index] = Resumption(tuple(entry.token_ids), entry.finished)
    if sum(resumption.finished for resumption in resume.values()) == outputs:
        raise rpc.invalid("resume", "resume must leave an output to draw for")
    return resume


def _bad_words(
    entries: Sequence[engine_pb2.TokenSequence], limits: Limits
) -> tuple[tuple[int, ...], ...]:
    """Check and convert the sequences of tokens that outputs must not contain."""
    check_count("bad_words", len(entries), 2 * MAX_BAD_WORDS)
    for i, entry in enumerate(entries):
        field, count = f"bad_words[{i}].token_ids", len(entry.token_ids)
        if not 1 <= count <= MAX_BAD_WORD_TOKENS:
            raise rpc.invalid(
                field, f"{field} must be 1 to {MAX_BAD_WORD_TOKENS} tokens; there are {count}"
            )
        check_token_ids(field, entry.token_ids, limits.vocab_size)
    return tuple(tuple(entry.token_ids) for entry in entries)


def _seconds(duration: Duration) -> float:
    """Return a duration as a float, which holds any that a router may send, unlike a timedelta."""
    return duration.seconds + duration.nanos / 1e9


def _constraint(message: sampling_pb2.OutputConstraint) -> Constraint:
    """Convert a checked constraint."""
    kind = ConstraintKind(message.WhichOneof("kind"))
    match kind:
        case ConstraintKind.JSON_OBJECT:
            return Constraint(kind)
        case ConstraintKind.CHOICES:
            return Constraint(kind, tuple(message.choices.values))
        case _:
            return Constraint(kind, (getattr(message, kind.value),))


def _beam(params: sampling_pb2.BeamSearchParams) -> BeamSearch:
    return BeamSearch(
        params.width,
        params.length_penalty if params.HasField("length_penalty") else 1.0,
        params.early_stopping,
    )


def _sampling(
    params: sampling_pb2.SamplingParams, output: sampling_pb2.OutputOptions
) -> SamplingParams:
    """Convert checked parameters; unset ones get their defaults."""
    fields = {
        name: value
        for message, of in ((params, "sampling"), (output, "output"))
        for name, _, value in set_values(message, of)
        if name in _SAMPLING
    }
    fields["logit_bias"] = dict(params.logit_bias)
    fields["allowed_token_ids"] = list(params.allowed_token_ids)
    fields.setdefault("seed", secrets.randbits(64))
    if fields.get("temperature") == 0:
        fields["top_k"] = 0
    return SamplingParams(**fields)
