"""Messages that no well-behaved client sends: random, nearly valid, and broken on the wire."""

import math
import random
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from benchmarks.fixture import VOCABULARY
from octavo.v1 import engine_pb2, generation_pb2

M = TypeVar("M", bound=Message)

F = FieldDescriptor
INTEGERS = {
    F.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    F.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    F.TYPE_UINT32: (0, (1 << 32) - 1),
    F.TYPE_UINT64: (0, (1 << 64) - 1),
    F.TYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
}
FLOATS = (
    *(math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 1e-6, 0.5, 1.0, 2.0),
    *(-1.0, 100.0, 3.4e38, -3.4e38),
)
STRINGS = (
    *("", " ", "a", "tiny", "user", "assistant", "\0", "\n\r\t", "é" * 9, "日本語", "🎉" * 3),
    *("\u202e\u0301", "{{ 7*7 }}", "</s>", "%s%n", "../..", "x" * 129, "y" * 5000),
)
IDS = ("", "a", "b", "c")
"""So few ids that calls often name, and abort, each other's requests."""
STRUCT = Struct.DESCRIPTOR.full_name
DENSITIES = (0.15, 0.5, 0.9)


def wild(kind: type[M], rng: random.Random, density: float | None = None) -> M:
    """Return a message with each field set to any value of its type, at random."""
    density = rng.choice(DENSITIES) if density is None else density
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if rng.random() < density:
            _set(message, field, rng, density)
    return message


def disturb(message: Message, rng: random.Random) -> None:
    """Set one field, at any depth, to anything, or clear it."""
    field = rng.choice(message.DESCRIPTOR.fields)
    if _has_parts(field) and rng.random() < 0.9:
        disturb(getattr(message, field.name), rng)
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        _set(message, field, rng, 0.5)


def _has_parts(field: FieldDescriptor) -> bool:
    """Return whether a field is a single message, so that its fields can be set."""
    is_message = field.type == F.TYPE_MESSAGE and not field.is_repeated
    return is_message and field.message_type.full_name != STRUCT


def _set(message: Message, field: FieldDescriptor, rng: random.Random, density: float) -> None:
    if field.type == F.TYPE_MESSAGE and field.message_type.full_name == STRUCT:
        _set_struct(getattr(message, field.name), rng)
    elif _is_map(field):
        entries = getattr(message, field.name)
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(_count(rng)):
            entries[_scalar(key, rng)] = _scalar(value, rng)
    elif field.type == F.TYPE_MESSAGE:
        kind = _class_of(message, field)
        if field.is_repeated:
            made = [wild(kind, rng, density) for _ in range(min(_count(rng), 8))]
            getattr(message, field.name).extend(made)
        else:
            getattr(message, field.name).CopyFrom(wild(kind, rng, density))
    elif field.is_repeated:
        getattr(message, field.name).extend(_scalar(field, rng) for _ in range(_count(rng)))
    else:
        setattr(message, field.name, _scalar(field, rng))


def _set_struct(struct: Struct, rng: random.Random) -> None:
    """Set JSON of a random shape; a random Struct would never end."""
    values = (None, True, 1.5, 1e300, "", [], {}, [[["x"]]], {"a": {"b": [None]}}, "y" * 5000)
    struct.update({rng.choice(STRINGS): rng.choice(values) for _ in range(min(_count(rng), 8))})


def _scalar(field: FieldDescriptor, rng: random.Random) -> Any:  # noqa: ANN401 - any type
    if field.type in INTEGERS:
        low, high = INTEGERS[field.type]
        edges = (low, high, 0, 1, 2, VOCABULARY - 1, VOCABULARY, rng.randrange(64))
        return rng.choice((*edges, rng.randint(low, high)))
    if field.type in (F.TYPE_FLOAT, F.TYPE_DOUBLE):
        return rng.choice((*FLOATS, rng.uniform(-2, 2)))
    if field.type == F.TYPE_BOOL:
        return rng.random() < 0.5
    if field.name == "request_id":
        return rng.choice((*IDS, rng.choice(STRINGS)))
    text = rng.choice(STRINGS)
    return text.encode() if field.type == F.TYPE_BYTES else text


def _count(rng: random.Random) -> int:
    return rng.choice((0, 1, 1, 2, 3, 5, 17, 300))


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _class_of(message: Message, field: FieldDescriptor) -> type[Message]:
    value = getattr(message, field.name)
    return type(value.add()) if field.is_repeated else type(value)


# Valid requests.


def generate(rng: random.Random) -> generation_pb2.GenerateRequest:
    """Return a valid request."""
    request = generation_pb2.GenerateRequest(priority=rng.randint(-3, 3))
    match rng.randrange(4):
        case 0:
            request.chat.messages.add(role="user", content="hello")
        case 1:
            request.tokens.token_ids.extend(_tokens(rng))
        case _:
            request.text = "once upon a time " * rng.randint(1, 12)
    _sample(request, rng)
    request.stop.strings.extend(rng.choice(((), ("e",), ("never", "zz"))))
    return request


def submit(rng: random.Random) -> engine_pb2.Submit:
    """Return a valid submission."""
    request = engine_pb2.Submit(request_id=rng.choice(IDS), prompt_token_ids=_tokens(rng))
    _sample(request, rng)
    if rng.random() < 0.2 and not request.HasField("beam"):
        drawn = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(4))]
        request.resume.add(index=rng.randrange(request.sampling.n or 1), token_ids=drawn)
    if rng.random() < 0.3:
        request.timeout.FromMilliseconds(rng.randrange(50))
    return request


def _sample(
    request: generation_pb2.GenerateRequest | engine_pb2.Submit, rng: random.Random
) -> None:
    """Fill in the fields that both types of requests share."""
    request.stop.max_tokens = rng.choice((1, 2, 8, 8, 24, 100))
    if rng.random() < 0.1:
        request.beam.width = rng.randint(1, 4)
    else:
        sampling = request.sampling
        sampling.temperature = rng.choice((0.0, 0.7, 1.0))
        sampling.n = rng.choice((1, 1, 1, 2, 5))
        if rng.random() < 0.3:
            sampling.top_p, sampling.top_k, sampling.min_p = 0.9, 20, 0.05
        if rng.random() < 0.2:
            sampling.logit_bias[rng.randrange(VOCABULARY)] = rng.uniform(-100, 100)
            sampling.repetition_penalty, sampling.presence_penalty = 1.3, -0.5
        if rng.random() < 0.2:
            request.output.logprobs = rng.randrange(3)
            request.output.prompt_logprobs = rng.randrange(3)
    request.output.token_ids = rng.random() < 0.5


def _tokens(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 5, 16, 40, 200)))]


# Bytes.


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 4)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _insert(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randint(1, 12))


def _repeat(data: bytearray, rng: random.Random) -> None:
    """Repeat a slice: singular fields, other arms of a oneof."""
    start = rng.randrange(len(data) + 1)
    data.extend(data[start : start + rng.randrange(64)])


def _unknown(data: bytearray, rng: random.Random) -> None:
    """Append an unknown field."""
    tag = (rng.randint(1000, 5000) << 3) | 2
    data += bytes([tag & 127 | 128, tag >> 7 & 127 | 128, tag >> 14, 4]) + rng.randbytes(4)


def _nest(data: bytearray, rng: random.Random) -> None:
    """Nest groups deeper than any parser allows."""
    data += bytes([3 | rng.randint(1, 15) << 3]) * rng.choice((50, 150, 5000))


def _bad_text(data: bytearray, rng: random.Random) -> None:
    """Break UTF-8, if there is any: set a byte that UTF-8 does not allow."""
    letters = [i for i, byte in enumerate(data) if byte > 96]
    if letters:
        data[rng.choice(letters)] = 0xFF


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(_flip, _cut, _insert, _repeat, _unknown, _nest, _bad_text),
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Break a serialized message in one to three ways."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        rng.choice(MUTATIONS)(changed, rng)
    return bytes(changed)
