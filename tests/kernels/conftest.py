"""Random batches over a paged cache, and checks for any implementation."""

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
from octavo.kernels.activation import KINDS, Activation
from octavo.kernels.metadata import AttentionMetadata, AttentionPlan, AttentionShape
from octavo.kernels.sampling_tensors import SamplingTensors
from octavo.kernels.whole_numbers import rounded, width_of

# Powers of two: any dtype represents an fp8 cache's values exactly.
KEY_SCALE, VALUE_SCALE = 0.5, 0.125
activations = st.builds(
    Activation,
    kind=st.sampled_from(sorted(KINDS)),
    gated=st.booleans(),
    alpha=st.sampled_from([1.0, 1.702]),
    limit=st.sampled_from([0.0, 0.5]),
    offset=st.sampled_from([0.0, 1.0]),
)
"""Every field is drawn explicitly: from types alone, Hypothesis would draw values such as NaN."""
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """An attention batch without the tensors' values."""

    lengths: list[tuple[int, int]]  # (queries, tokens) of each sequence
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 32  # dtype of queries and keys
    value_dim: int | None = None  # that of keys if None
    latent: bool = False
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    seed: int = 0
    scale: float | None = None
    cache_dtype: torch.dtype | None = None  # the queries' if None
    subnormals: bool = True  # whether fp8 values may be subnormal
    garbage: float = math.nan  # value in slots past a sequence's end; free blocks are NaN
    releases: bool = True  # blocks before the keys that queries see are free

    @property
    def width_of_values(self) -> int:
        return self.value_dim or self.head_dim

    def first_seen(self, position: int) -> int:
        """Return the first key that a query sees."""
        position = max(position, 0)  # padding has a query without a token
        if self.sliding_window is not None:
            return max(0, position - self.sliding_window + 1)
        return 0 if self.chunk is None else position - position % self.chunk

    @property
    def kept_as(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def scales(self) -> dict[str, float]:
        fp8 = self.cache_dtype is not None and not self.in_whole_numbers
        return {"key_scale": KEY_SCALE, "value_scale": VALUE_SCALE} if fp8 else {}

    @property
    def in_whole_numbers(self) -> bool:
        return self.cache_dtype == torch.int8


@dataclass
class Batch:
    """A case's tensors. Values that must not be read are NaN."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor | None
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
    whole: Sequence[torch.dtype] = (),
    subnormals: bool = True,
) -> Case:
    """Draw batches of sequences of at most `longest` tokens.

    Half of them are short and a third are decodes; sequences without tokens are padding.
    `most_rows`, a sequence's queries times a group's heads, limits the time.
    """
    group = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 20, 71]))

    def sequence() -> tuple[int, int]:
        tokens = draw(st.integers(0, min(40, longest)) | st.integers(0, longest))
        most = min(tokens, most_rows // group)
        chunk = st.integers(0, min(most, 40)) | st.integers(0, most)
        return draw(st.just(1) | chunk), tokens

    width = st.integers(1, 32).map(lambda units: 8 * units)
    head_dim = draw(width | st.sampled_from([320, 512, 576]))
    latent = not whole and draw(st.integers(0, 3)) == 0
    others = width.filter(lambda dim: dim <= head_dim) if latent else width | st.just(512)
    window, chunk = draw(
        st.tuples(st.none() | st.integers(1, 100), st.none())
        | st.tuples(st.none(), st.integers(1, 100))
    )
    return Case(
        lengths=[sequence() for _ in range(draw(st.integers(1, most_sequences)))],
        num_kv_heads=draw(st.integers(1, 3)),
        group=group,
        head_dim=head_dim,
        value_dim=draw((st.none() if head_dim <= 512 else others) | others),
        latent=latent,
        block_size=draw(st.sampled_from([16 if whole else 8, 16, 32, 64, 128, 256])),
        dtype=draw(st.sampled_from(list(TOLERANCES))),
        sliding_window=window,
        chunk=chunk,
        soft_cap=draw(st.none() | st.floats(0.5, 30)),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
        cache_dtype=draw(st.sampled_from(whole or [None, *fp8])),
        subnormals=subnormals,
        garbage=draw(st.sampled_from([math.nan, math.inf, 300.0])),
    )


def _carve(memory: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a layer's caches in `[num_blocks, layers, elements]`: the second layer, so strided."""
    heads, size = case.num_kv_heads, case.block_size
    widths = [width_of(dim, memory.dtype) for dim in (case.head_dim, case.width_of_values)]
    of_keys = heads * size * widths[0]
    layer = memory[:, 1]
    keys = layer[:, :of_keys].unflatten(1, (heads, size, widths[0]))
    if case.latent:
        return keys, None
    return keys, layer[:, of_keys:].unflatten(1, (heads, size, widths[1]))


def without_subnormals(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Round subnormal fp8 values to zero or to the smallest normal value."""
    least = torch.finfo(dtype).smallest_normal * scale
    return torch.where(x.abs() < least, least * (x / least).round(), x)


def _elements(case: Case, kept_as: torch.dtype | None = None) -> int:
    """Return the elements of one layer's block, in the queries' dtype or another one."""
    dims = [case.head_dim] if case.latent else [case.head_dim, case.width_of_values]
    width = sum(width_of(dim, kept_as or case.dtype) for dim in dims)
    return case.num_kv_heads * case.block_size * width


def _build(case: Case, device: str = "cpu") -> Batch:
    generator = torch.Generator().manual_seed(case.seed)
    shuffled = random.Random(case.seed)
    counts = [-(-tokens // case.block_size) for _, tokens in case.lengths]
    num_blocks = sum(counts) + 3
    blocks = shuffled.sample(range(num_blocks), num_blocks)
    width = max(1, *counts) + shuffled.randrange(2)  # often none is left after the longest
    # Padding names any block, free ones among them.
    tables = [[shuffled.randrange(num_blocks) for _ in range(width)] for _ in counts]
    key_cache, value_cache = _carve(torch.full((num_blocks, 2, _elements(case)), torch.nan), case)
    for table, count, (queries, tokens) in zip(tables, counts, case.lengths, strict=True):
        table[:count] = [blocks.pop() for _ in range(count)]
        first_seen = case.first_seen(tokens - queries) if case.releases else 0
        released = first_seen // 16 * 16 // case.block_size
        for index in range(released, count):
            filled = min(case.block_size, tokens - index * case.block_size)
            for cache in (key_cache, value_cache):
                if cache is not None:
                    shape = (case.num_kv_heads, filled, cache.shape[3])
                    cache[table[index], :, :filled] = torch.randn(shape, generator=generator)
        # Blocks that no query sees are free; their entries may be any number.
        table[:released] = shuffled.choices([-1, 2**31 - 1, blocks[0]], k=released)
    if case.scales:
        key_cache /= KEY_SCALE
        if value_cache is not None:
            value_cache /= VALUE_SCALE
        if not case.subnormals:
            key_cache, value_cache = (
                None if cache is None else without_subnormals(cache, case.cache_dtype)
                for cache in (key_cache, value_cache)
            )
    num_heads = case.num_kv_heads * case.group
    queries = [queries for queries, _ in case.lengths]
    given_as = case.dtype if case.in_whole_numbers else case.kept_as
    # A view of a wider tensor, as from a fused projection.
    fused = torch.randn((sum(queries), num_heads + 2, case.head_dim), generator=generator)
    sinks = 2 * torch.randn(num_heads, generator=generator)
    options: dict[str, Any] = {
        "scale": case.head_dim**-0.5 if case.scale is None else case.scale,
        "sliding_window": case.sliding_window,
        "chunk": case.chunk,
        "soft_cap": case.soft_cap,
        "alibi_slopes": 2.0 ** -torch.arange(1, num_heads + 1) if case.alibi else None,
        "sinks": sinks if case.sinks else None,
        "value_dim": case.width_of_values if case.latent else None,
    } | case.scales
    for name in ("alibi_slopes", "sinks"):
        if options[name] is not None:
            options[name] = options[name].to(device)
    return Batch(
        query=fused.to(case.dtype).to(device)[:, :num_heads],
        key_cache=key_cache.to(given_as).to(device),
        value_cache=None if value_cache is None else value_cache.to(given_as).to(device),
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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a batch's caches with blocks in an implementation's own order.

    The implementation itself writes them, as for a model.
    """
    shape = (batch.key_cache.shape[0], 2, _elements(case, case.kept_as))
    memory = torch.full(shape, torch.nan, device=batch.query.device).to(case.kept_as)
    if case.in_whole_numbers:
        memory.view(torch.uint8).fill_(255)  # a NaN in bfloat16
    caches = _carve(memory, case)
    (slots,) = torch.where(
        ~batch.key_cache.float().transpose(1, 2).flatten(0, 1).isnan().any(2).any(1)
    )
    if not case.in_whole_numbers:
        memory[slots // case.block_size] = torch.tensor(case.garbage).to(memory)
    tokens = (
        None
        if cache is None
        else (cache.float() * scale).to(case.dtype).transpose(1, 2).flatten(0, 1)[slots]
        for cache, scale in (
            (batch.key_cache, case.scales.get("key_scale", 1.0)),
            (batch.value_cache, case.scales.get("value_scale", 1.0)),
        )
    )
    kernels.write_kv(*tokens, *caches, slots, **case.scales)
    return caches


def _order(kernels: ModuleType, case: Case, device: str) -> list[torch.Tensor]:
    """Return each element's place in a block's head, for an implementation's layout.

    `[block_size, dim]` for keys and for values, found by writing each one's offset in the block,
    then its place in the head.
    """
    dims = [case.head_dim] if case.latent else [case.head_dim, case.width_of_values]
    sizes = [case.block_size * dim for dim in dims]
    slots = torch.arange(case.block_size, device=device)
    numbers = [torch.zeros(n, dtype=torch.int64, device=device) for n in sizes]
    for digit in range(3, -1, -1):  # in base 8, which any dtype represents exactly
        for of_slots in (True, False):
            tokens, caches = [], []
            for dim in dims:
                place = slots[:, None, None] if of_slots else torch.arange(dim, device=device)
                digits = (place // 8**digit % 8).to(case.dtype)
                tokens.append(digits.expand(len(slots), 1, dim))
                cache = torch.zeros((1, 1, case.block_size, dim), device=device)
                caches.append(cache.to(case.kept_as))
            none = [None] * case.latent
            kernels.write_kv(*tokens, *none, *caches, *none, slots)
            step = 8**digit
            numbers = [
                number + cache.flatten().float().long() * step * (dim if of_slots else 1)
                for number, cache, dim in zip(numbers, caches, dims, strict=True)
            ]
    return [number.argsort().view(-1, dim) for number, dim in zip(numbers, dims, strict=True)]


def _attention_shape(case: Case, device: str) -> AttentionShape:
    """Return the shape of a case's layer, to plan its attention."""
    return AttentionShape(
        num_heads=case.num_kv_heads * case.group,
        num_kv_heads=case.num_kv_heads,
        key_dim=case.head_dim,
        value_dim=case.width_of_values,
        latent=case.latent,
        span=case.sliding_window or case.chunk,
        dtype=case.dtype,
        cache_dtype=case.kept_as,
        device=torch.device(device),
    )


def _check_attention(
    kernels: ModuleType,
    case: Case,
    device: str = "cpu",
    splits: int | None = None,
    planned: Sequence[int] | None = None,  # queries of each sequence; None: the batch's
    plan: AttentionPlan | None = None,
) -> None:
    batch = _build(case, device)
    caches = _in_order_of(kernels, case, batch)
    metadata = batch.metadata
    if splits is not None:
        plan = kernels.plan_attention(
            np.array(planned or [queries for queries, _ in case.lengths]),
            np.array([tokens for _, tokens in case.lengths]),
            _attention_shape(case, device),
            splits=splits,
        )
    if plan is not None:
        metadata = replace(metadata, plan=plan)
    out = kernels.paged_attention(batch.query, *caches, metadata, **batch.options)
    # In float32 from the same inputs, so that all error is the kernel's.
    kept = [
        None
        if cache is None
        else rounded(cache, keys=cache is batch.key_cache)
        if case.in_whole_numbers
        else cache.float()
        for cache in (batch.key_cache, batch.value_cache)
    ]
    expected = reference.paged_attention(
        batch.query.float(),
        *kept,
        batch.metadata,
        **batch.options,
    )
    assert out.shape == (*batch.query.shape[:2], case.width_of_values)
    assert out.dtype == case.dtype
    assert out.is_contiguous()
    tolerance = max(TOLERANCES[case.dtype], 1e-3 if case.in_whole_numbers else 0)
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def _check_chunks(
    kernels: ModuleType, case: Case, cuts: Sequence[int], threads: Sequence[int]
) -> None:
    """A prompt's results have the same bits whole, in chunks, alone and among other sequences."""
    batch = _build(replace(case, releases=False))
    caches = _in_order_of(kernels, case, batch)
    ((_, tokens),) = case.lengths

    def attend(chunks: Sequence[tuple[int, int]]) -> torch.Tensor:
        queries = [end - begin for begin, end in chunks]
        metadata = replace(
            batch.metadata,
            query_starts=torch.tensor([0, *queries]).cumsum(0).int(),
            seq_lens=torch.tensor([end for _, end in chunks], dtype=torch.int32),
            block_tables=batch.metadata.block_tables.expand(len(chunks), -1).contiguous(),
            slot_mapping=torch.zeros(sum(queries), dtype=torch.int64),
            max_query_len=max(queries),
            max_seq_len=max(end for _, end in chunks),
        )
        query = torch.cat([batch.query[begin:end] for begin, end in chunks])
        return kernels.paged_attention(query, *caches, metadata, **batch.options)

    bounds = sorted({0, tokens, *(cut for cut in cuts if cut < tokens)})
    chunks = list(itertools.pairwise(bounds))
    whole = attend([(0, tokens)])
    for count in threads:
        torch.set_num_threads(count)
        assert torch.equal(attend(chunks), whole)
        assert torch.equal(torch.cat([attend([chunk]) for chunk in chunks]), whole)


def _check_write(
    kernels: ModuleType, case: Case, device: str = "cpu", *, rounds: bool = True
) -> None:
    """Write to random slots, some skipped, from strided views, and compare every byte.

    If not `rounds`, an fp8 cache gets only values that it represents exactly.
    """
    generator = torch.Generator().manual_seed(case.seed)
    num_blocks, num_tokens = 5, sum(queries for queries, _ in case.lengths)
    num_tokens = min(num_tokens, num_blocks * case.block_size)
    shape = (num_blocks, 3, _elements(case))
    memory = torch.randn(shape, generator=generator).to(case.kept_as).to(device)
    expected = memory.clone()
    slots = torch.randperm(num_blocks * case.block_size, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.2] = -1
    slots = slots.to(device)
    tokens: list[torch.Tensor | None] = []
    for dim in (case.head_dim, case.width_of_values):
        fused = torch.randn((num_tokens, 2 * case.num_kv_heads, dim), generator=generator)
        if case.cache_dtype and not rounds:
            fused = fused.to(case.cache_dtype).float()
        fused[:: max(1, num_tokens // 3)] *= 3e4  # beyond e4m3's range
        tokens.append(fused.to(case.dtype).to(device)[:, case.num_kv_heads :])
    if case.latent:
        tokens[1] = None
    kernels.write_kv(*tokens, *_carve(memory, case), slots, **case.scales)
    if case.cache_dtype is not None and not case.subnormals:
        tokens = [
            None if rows is None else without_subnormals(rows.float(), case.cache_dtype, scale)
            for rows, scale in zip(tokens, case.scales.values(), strict=True)
        ]
    plain = _carve(torch.zeros_like(expected), case)
    reference.write_kv(*tokens, *plain, slots, **case.scales)
    places = _order(kernels, case, device)
    for cache, rows, place in zip(_carve(expected, case), plain, places, strict=False):
        heads = cache.flatten(2)
        for slot in slots.tolist():
            block, offset = divmod(slot, case.block_size)
            if slot >= 0:
                heads[block][:, place[offset]] = rows[block, :, offset]
    assert torch.equal(memory.view(torch.uint8), expected.view(torch.uint8))


def _check_copies(kernels: ModuleType, case: Case, device: str = "cpu") -> None:
    """Copy blocks within a cache, to another one and back, and compare every byte."""
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
    draw: st.DrawFn, vocab_sizes: tuple[int, ...], most_rows: int
) -> tuple[torch.Tensor, SamplingTensors]:
    """Draw rows of logits, each with its own parameters, including extremes."""
    vocab_size, n = draw(st.sampled_from(vocab_sizes)), draw(st.integers(1, most_rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    logits = torch.randn((n, vocab_size), generator=generator) * draw(st.sampled_from([0.5, 3.0]))
    if draw(st.booleans()):
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
    """Sample all rows together, and one of them alone.

    A token is right if logits that differ only by rounding would give it.
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


def _check_greatest_uniform(kernels: ModuleType, vocab_size: int, device: str = "cpu") -> None:
    """Sample with the greatest uniform number, which the running sum exceeds only at its end.

    In every other row the last token's weight raises a float64 sum; in the others it is lost. The
    tokens before it have a sum that float32 rounds.
    """
    n, heavy = 32, 20
    logits = torch.full((n, vocab_size), -torch.inf)
    logits[:, :heavy] = torch.randn((n, heavy), generator=torch.Generator().manual_seed(0))
    logits[:, 0] = 3.0
    logits[0::2, -2:] = 3.0 + torch.tensor([1e-9, 1e-14]).log()
    logits[1::2, -1] = 3.0 + math.log(2e-18)
    draws = SamplingTensors.greedy(n)._replace(
        temperatures=np.ones(n), uniforms=np.full(n, 1 - 2.0**-53)
    )
    expected = [vocab_size - 1, heavy - 1] * (n // 2)
    assert reference.draw_tokens(logits, draws).tolist() == expected
    assert kernels.draw_tokens(logits.to(device), draws).tolist() == expected


@st.composite
def _masked_rows(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], np.ndarray]:
    """Draw logits, some of their rows, and a mask for each, of right, lesser or greater length."""
    columns = draw(st.integers(1, 200) | st.sampled_from([4095, 4096, 4097, 9000]))
    count = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from(list(TOLERANCES)))
    logits = torch.randn((count, columns + 3), generator=generator).to(dtype)[:, 2:-1]
    rows = draw(st.lists(st.integers(0, count - 1), unique=True, min_size=1))
    words = max(1, -(-columns // 32) + draw(st.sampled_from([-1, 0, 0, 1])))
    words_of = draw(st.sampled_from([(-(2**31), 2**31), (0, 1), (-1, 0)]))  # some, none, all
    random_words = np.random.default_rng(draw(st.integers(0, 99)))
    masks = random_words.integers(*words_of, (len(rows), words)).astype(np.int32)
    return logits, rows, masks


def _check_masks(
    kernels: ModuleType,
    logits: torch.Tensor,
    rows: list[int],
    masks: np.ndarray,
    device: str = "cpu",
) -> None:
    numbers = np.array(rows, np.int64)
    found, expected = logits.clone().to(device), logits.clone()
    kernels.mask_logits(found, numbers, masks)
    reference.mask_logits(expected, numbers, masks)
    assert torch.equal(found.cpu(), expected)


@dataclass(frozen=True)
class Harness:
    """The tests that all implementations share."""

    case: type[Case] = Case
    tolerances: dict[torch.dtype, float] = field(default_factory=lambda: TOLERANCES)
    cases: Callable[..., st.SearchStrategy[Case]] = _cases
    build: Callable[..., Batch] = _build
    carve: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = _carve
    elements: Callable[[Case], int] = _elements
    attention_shape: Callable[..., AttentionShape] = _attention_shape
    check_attention: Callable[..., None] = _check_attention
    check_chunks: Callable[..., None] = _check_chunks
    check_write: Callable[..., None] = _check_write
    check_copies: Callable[..., None] = _check_copies
    rows_to_draw_from: Callable[..., st.SearchStrategy[tuple[torch.Tensor, SamplingTensors]]] = (
        _rows_to_draw_from
    )
    check_draws: Callable[..., None] = _check_draws
    check_greatest_uniform: Callable[..., None] = _check_greatest_uniform
    masked_rows: Callable[..., st.SearchStrategy[Any]] = _masked_rows
    check_masks: Callable[..., None] = _check_masks


@pytest.fixture(scope="session")
def harness() -> Harness:
    return Harness()


@pytest.fixture
def two_threads():
    """Use two compute threads on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
