"""Random batches over a paged cache, and what any implementation must make of them."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from octavo.kernels import reference
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.sampling_tensors import SamplingTensors

# Powers of two: what an fp8 cache holds, any dtype holds exactly.
KEY_SCALE, VALUE_SCALE = 0.5, 0.125
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """A batch to attend: everything but the numbers."""

    lengths: list[tuple[int, int]]  # (queries, tokens) of each sequence
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    seed: int = 0
    scale: float | None = None
    cache_dtype: torch.dtype | None = None  # that of queries if None
    garbage: float = math.nan  # in slots past a sequence's end; free blocks are NaN

    @property
    def kept_as(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def scales(self) -> dict[str, float]:
        fp8 = self.cache_dtype is not None
        return {"key_scale": KEY_SCALE, "value_scale": VALUE_SCALE} if fp8 else {}


@dataclass
class Batch:
    """A case's tensors. All that must not be read is NaN."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    options: dict[str, Any] = field(default_factory=dict)


@st.composite
def _cases(
    draw: st.DrawFn,
    longest: int = 300,
    most_rows: int = 1400,
    most_sequences: int = 5,
    *,
    fp8: Sequence[torch.dtype] = (),
) -> Case:
    """Draws batches of sequences of at most `longest` tokens.

    Half of them are short, and a third decodes: those of no tokens are padding. What
    bounds the time is `most_rows`, a sequence's queries times the heads of a group.
    """
    group = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 20, 71]))

    def sequence() -> tuple[int, int]:
        tokens = draw(st.integers(0, min(40, longest)) | st.integers(0, longest))
        most = min(tokens, most_rows // group)
        chunk = st.integers(0, min(most, 40)) | st.integers(0, most)
        return draw(st.just(1) | chunk), tokens

    return Case(
        lengths=[sequence() for _ in range(draw(st.integers(1, most_sequences)))],
        num_kv_heads=draw(st.integers(1, 3)),
        group=group,
        head_dim=8 * draw(st.integers(4, 32)),
        block_size=draw(st.sampled_from([8, 16, 32, 64, 128, 256])),
        dtype=draw(st.sampled_from(list(TOLERANCES))),
        sliding_window=draw(st.none() | st.integers(1, 100)),
        soft_cap=draw(st.none() | st.floats(0.5, 30)),
        alibi=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
        cache_dtype=draw(st.sampled_from([None, *fp8])),
        garbage=draw(st.sampled_from([math.nan, math.inf, 300.0])),
    )


def _build(case: Case, device: str = "cpu") -> Batch:
    generator = torch.Generator().manual_seed(case.seed)
    shuffled = random.Random(case.seed)
    counts = [-(-tokens // case.block_size) for _, tokens in case.lengths]
    num_blocks = sum(counts) + 3
    blocks = shuffled.sample(range(num_blocks), num_blocks)
    width = max(counts) + 1
    # Padding names any block, free ones among them.
    tables = [[shuffled.randrange(num_blocks) for _ in range(width)] for _ in counts]
    # Two layers, of which the second is used: blocks are strided.
    shape = (num_blocks, 2, 2, case.num_kv_heads, case.block_size, case.head_dim)
    cache = torch.full(shape, torch.nan)
    for table, count, (_, tokens) in zip(tables, counts, case.lengths, strict=True):
        table[:count] = [blocks.pop() for _ in range(count)]
        for position in range(tokens):
            place = (table[position // case.block_size], 1, slice(None), slice(None))
            cache[(*place, position % case.block_size)] = torch.randn(
                (2, case.num_kv_heads, case.head_dim), generator=generator
            )
    if case.cache_dtype is not None:
        cache /= torch.tensor([KEY_SCALE, VALUE_SCALE]).view(2, 1, 1, 1)
    cache = cache.to(case.kept_as).to(device)
    num_heads = case.num_kv_heads * case.group
    queries = [queries for queries, _ in case.lengths]
    # A view of a wider tensor, as a fused projection gives.
    fused = torch.randn((sum(queries), num_heads + 2, case.head_dim), generator=generator)
    options: dict[str, Any] = {
        "scale": case.head_dim**-0.5 if case.scale is None else case.scale,
        "sliding_window": case.sliding_window,
        "soft_cap": case.soft_cap,
        "alibi_slopes": 2.0 ** -torch.arange(1, num_heads + 1) if case.alibi else None,
    } | case.scales
    if case.alibi:
        options["alibi_slopes"] = options["alibi_slopes"].to(device)
    return Batch(
        query=fused.to(case.dtype).to(device)[:, :num_heads],
        key_cache=cache[:, 1, 0],
        value_cache=cache[:, 1, 1],
        metadata=AttentionMetadata(
            query_starts=torch.tensor([0, *queries]).cumsum(0).int().to(device),
            seq_lens=torch.tensor([n for _, n in case.lengths], dtype=torch.int32).to(device),
            block_tables=torch.tensor(tables, dtype=torch.int32).to(device),
            slot_mapping=torch.zeros(sum(queries), dtype=torch.int64).to(device),
            max_query_len=max(queries),
            max_seq_len=max(tokens for _, tokens in case.lengths),
        ),
        options=options,
    )


def _in_order_of(
    kernels: ModuleType, case: Case, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch's caches with blocks in the order that an implementation keeps.

    The order is its own: what is written here is what a model would have written.
    """
    shape = (batch.key_cache.shape[0], 2, *batch.key_cache.shape[1:])
    both = torch.full(shape, torch.nan, device=batch.query.device).to(batch.key_cache.dtype)
    key_cache, value_cache = both[:, 0], both[:, 1]
    keys, values = (
        (cache.float() * scale).to(case.dtype).transpose(1, 2).flatten(0, 1)
        for cache, scale in (
            (batch.key_cache, case.scales.get("key_scale", 1.0)),
            (batch.value_cache, case.scales.get("value_scale", 1.0)),
        )
    )
    (slots,) = torch.where(~keys.isnan().any(2).any(1))
    both[slots // case.block_size] = torch.tensor(case.garbage).to(both)
    kernels.write_kv(keys[slots], values[slots], key_cache, value_cache, slots, **case.scales)
    return key_cache, value_cache


def _order(kernels: ModuleType, case: Case, device: str) -> torch.Tensor:
    """Returns where in a block's head an implementation keeps each element.

    `[2, block_size, head_dim]`, for keys and values: found by writing each one's offset
    in the block, then its place in the head.
    """
    shape = (case.block_size, 1, case.head_dim)
    size = math.prod(shape)
    if case.cache_dtype is not None:  # too few numbers; only GPUs have it, and in plain order
        return torch.arange(size).view(1, *shape[::2]).expand(2, -1, -1)
    slots = torch.arange(case.block_size, device=device)
    offsets, places = slots[:, None, None], torch.arange(case.head_dim, device=device)
    numbers = torch.zeros((2, size), dtype=torch.int64, device=device)
    for digit in (offsets, places):
        tokens = digit.to(case.dtype).expand(shape).contiguous()
        cache = tokens.new_zeros((1, 2, 1, case.block_size, case.head_dim))
        kernels.write_kv(tokens, tokens, cache[:, 0], cache[:, 1], slots)
        numbers = numbers * case.head_dim + cache.view(2, size).long()
    return numbers.argsort(1).view(2, case.block_size, case.head_dim)


def _check_attention(
    kernels: ModuleType, case: Case, device: str = "cpu", splits: int | None = None
) -> None:
    batch = _build(case, device)
    caches = _in_order_of(kernels, case, batch)
    metadata = batch.metadata
    if splits is not None:
        plan = kernels.plan_attention(
            np.array([queries for queries, _ in case.lengths]),
            np.array([tokens for _, tokens in case.lengths]),
            num_heads=case.num_kv_heads * case.group,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            dtype=case.dtype,
            cache_dtype=case.kept_as,
            device=batch.query.device,
            splits=splits,
        )
        metadata = replace(metadata, plan=plan)
    out = kernels.paged_attention(batch.query, *caches, metadata, **batch.options)
    # In float32 from the very same inputs, so that all error is the kernel's own.
    expected = reference.paged_attention(
        batch.query.float(),
        batch.key_cache.float(),
        batch.value_cache.float(),
        batch.metadata,
        **batch.options,
    )
    assert out.shape == batch.query.shape
    assert out.dtype == case.dtype
    assert out.is_contiguous()
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def _check_write(
    kernels: ModuleType, case: Case, device: str = "cpu", *, rounds: bool = True
) -> None:
    """Writes to random slots, some skipped, from strided views, and looks at every byte.

    If not `rounds`, an fp8 cache is given nothing that it would have to round.
    """
    generator = torch.Generator().manual_seed(case.seed)
    num_blocks, num_tokens = 5, sum(queries for queries, _ in case.lengths)
    num_tokens = min(num_tokens, num_blocks * case.block_size)
    shape = (num_blocks, 3, 2, case.num_kv_heads, case.block_size, case.head_dim)
    cache = torch.randn(shape, generator=generator).to(case.kept_as).to(device)
    expected = cache.clone()
    slots = torch.randperm(num_blocks * case.block_size, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.2] = -1
    slots = slots.to(device)
    fused = torch.randn((num_tokens, 3 * case.num_kv_heads, case.head_dim), generator=generator)
    if case.cache_dtype and not rounds:
        fused = fused.to(case.cache_dtype).float()
    fused[:: max(1, num_tokens // 3)] *= 3e4  # more than e4m3 holds
    _, key, value = fused.to(case.dtype).to(device).chunk(3, 1)
    kernels.write_kv(key, value, cache[:, 1, 0], cache[:, 1, 1], slots, **case.scales)
    plain = torch.empty((2, num_blocks * case.block_size, *key.shape[1:]), device=device)
    plain = plain.to(case.kept_as).view(2, num_blocks, case.block_size, *key.shape[1:])
    plain = plain.transpose(2, 3).contiguous()
    reference.write_kv(key, value, plain[0], plain[1], slots, **case.scales)
    heads = expected.flatten(4)
    places = _order(kernels, case, device)
    for slot in slots.tolist():
        block, offset = divmod(slot, case.block_size)
        if slot >= 0:
            for kind in range(2):
                heads[block, 1, kind][:, places[kind, offset]] = plain[kind, block, :, offset]
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def _check_copies(kernels: ModuleType, case: Case, device: str = "cpu") -> None:
    """Copies blocks within a cache and to another one and back, and looks at every byte."""
    generator = torch.Generator().manual_seed(case.seed)
    inner = (2, 2, case.num_kv_heads, case.block_size, case.head_dim)
    cache = torch.randn((9, *inner), generator=generator).to(case.dtype).to(device)
    space = torch.randn((6, *inner), generator=generator).to(case.dtype).to(device)
    expected_cache, expected_space = cache.clone(), space.clone()
    for run in (kernels, reference):
        mine = run is kernels
        one, other = (cache, space) if mine else (expected_cache, expected_space)
        run.copy_blocks(one, torch.tensor([[0, 5], [0, 7], [3, 2]]))
        run.swap_blocks(one, other, torch.tensor([[8, 1], [5, 4]]))
        run.swap_blocks(other, one, torch.tensor([[0, 6], [4, 1], [4, 0]]))
    assert torch.equal(cache, expected_cache)
    assert torch.equal(space, expected_space)


@st.composite
def _rows_to_draw_from(
    draw: st.DrawFn, vocab_sizes: tuple[int, ...], most_rows: int, *, ties: bool = True
) -> tuple[torch.Tensor, SamplingTensors]:
    """Draws rows of logits, each with parameters of its own, the extremes among them."""
    vocab_size, n = draw(st.sampled_from(vocab_sizes)), draw(st.integers(1, most_rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    logits = torch.randn((n, vocab_size), generator=generator) * draw(st.sampled_from([0.5, 3.0]))
    if ties and draw(st.booleans()):
        logits = logits.round()
    impossible = torch.rand(logits.shape, generator=generator) < draw(st.sampled_from([0, 0.3]))
    impossible[:, draw(st.integers(0, vocab_size - 1))] = False
    logits[impossible] = -torch.inf
    some_k = [0, 1, 2, vocab_size - 1, vocab_size, vocab_size + 5]
    columns: list[st.SearchStrategy[Any]] = [
        st.sampled_from([0.0, 1e-45, 0.7, 1.0]) | st.floats(0.01, 100),
        st.sampled_from(some_k) | st.integers(1, vocab_size),
        st.sampled_from([1.0, 1e-45, 1 - 1e-7]) | st.floats(0.01, 1),
        st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
        st.sampled_from([0.0, 1 - 2.0**-53]) | st.floats(0, 1, exclude_max=True),
    ]
    params = [[draw(column) for _ in range(n)] for column in columns]
    return logits, SamplingTensors(*(np.array(column) for column in params))


FLOAT32_TINY = float(np.finfo(np.float32).tiny)
"""Kernels may round smaller weights to 0."""
ROUNDING = 1e-5


def _check_draws(
    kernels: ModuleType, logits: torch.Tensor, draws: SamplingTensors, device: str = "cpu"
) -> None:
    """Draws all rows together, and one of them alone.

    Right is what numbers would give that differ by no more than rounding.
    """
    found = kernels.draw_tokens(logits.to(device), draws).tolist()
    allowed: list[set[int]] = [set() for _ in found]
    nudges = itertools.product((-ROUNDING, ROUNDING), repeat=3)
    for some, more, most in [(0, 0, 0), (0, 0, FLOAT32_TINY), *nudges]:
        nearby = draws._replace(
            top_p=np.minimum(draws.top_p * (1 + some), 1),
            min_p=draws.min_p * (1 + more),
            uniforms=np.clip(draws.uniforms + most, 0, 1 - 2.0**-53),
        )
        for tokens, token in zip(allowed, reference.draw_tokens(logits, nearby), strict=True):
            tokens.add(int(token))
    wrong = [(row, token) for row, token in enumerate(found) if token not in allowed[row]]
    assert not wrong, (wrong, allowed)
    last = np.array([len(found) - 1])
    alone = kernels.draw_tokens(logits[last].to(device), draws.select(last)).tolist()
    assert alone == found[-1:]


@dataclass(frozen=True)
class Harness:
    """What the tests of every implementation share."""

    case: type[Case] = Case
    tolerances: dict[torch.dtype, float] = field(default_factory=lambda: TOLERANCES)
    cases: Callable[..., st.SearchStrategy[Case]] = _cases
    build: Callable[..., Batch] = _build
    check_attention: Callable[..., None] = _check_attention
    check_write: Callable[..., None] = _check_write
    check_copies: Callable[..., None] = _check_copies
    rows_to_draw_from: Callable[..., st.SearchStrategy[tuple[torch.Tensor, SamplingTensors]]] = (
        _rows_to_draw_from
    )
    check_draws: Callable[..., None] = _check_draws


@pytest.fixture(scope="session")
def harness() -> Harness:
    return Harness()
