"""Latent attention on a CPU, absorbed and expanded, against the reference."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.kernels import reference
from octavo.kernels.cpu import build
from octavo.kernels.cpu.latent import PackedLatents
from octavo.kernels.cpu.native import NativeKernels
from octavo.kernels.metadata import AttentionMetadata
from tests.kernels.conftest import without_subnormals

pytestmark = [
    pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("two_threads"),
]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Dims:
    heads: int
    latent: int
    key: int  # elements computed from a latent
    rotated: int
    value: int


DEEPSEEK = Dims(heads=4, latent=512, key=128, rotated=64, value=128)
LENGTHS = {
    "decodes": [(1, 7), (1, 300), (1, 1)],
    "whole prompts": [(70, 70), (2, 2), (130, 130)],
    "a chunk after few tokens": [(200, 330)],
    "a chunk after many": [(20, 900)],
    "two pieces of keys": [(300, 1100)],
    "three pieces, and decodes": [(1, 50), (400, 2300), (1, 40), (33, 40)],
}


@pytest.fixture(scope="session")
def native():
    return NativeKernels()


def check(
    native,
    dims,
    lengths,
    *,
    dtype=torch.float32,
    kept_as=None,
    block_size=16,
    seed=0,
    **options: Any,
):
    """Compare; values that must not be read are NaN, and blocks before a window are missing."""
    draw, shuffled = torch.Generator().manual_seed(seed), random.Random(seed)
    width = dims.latent + dims.rotated
    counts = [-(-tokens // block_size) for _, tokens in lengths]
    blocks = shuffled.sample(range(sum(counts) + 2), sum(counts) + 2)
    plain = torch.full((len(blocks), 1, block_size, width), torch.nan).to(kept_as or dtype)
    scale = {"key_scale": 0.01} if kept_as else {}  # an fp8 value times it is not exact in bfloat16
    cache = torch.empty_like(plain)
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    slots, rows = [], []
    for i, (table, (queries, tokens)) in enumerate(zip(tables, lengths, strict=True)):
        released = first_seen(tokens - queries, **options) // 16 * 16 // block_size
        first = released * block_size
        places = (divmod(at, block_size) for at in range(first, tokens))
        slots += [table[block] * block_size + offset for block, offset in places]
        rows.append(torch.randn((tokens - first, 1, width), generator=draw).to(dtype))
        tables[i] = [2**31 - 1] * released + table[released:]
    every = torch.arange(len(plain) * block_size)
    missing = torch.full((len(every), 1, width), torch.nan).to(dtype)
    native.write_kv(missing, None, cache, None, every, **scale)
    latents = torch.cat(rows)
    if kept_as:  # avoids subnormal numbers, which this cache lacks
        latents = without_subnormals(latents, kept_as, 0.01).to(dtype)
    native.write_kv(latents, None, cache, None, torch.tensor(slots), **scale)
    reference.write_kv(latents, None, plain, None, torch.tensor(slots), **scale)
    longest = max(map(len, tables))
    starts = torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0).int()
    metadata = AttentionMetadata(
        starts,
        torch.tensor([tokens for _, tokens in lengths], dtype=torch.int32),
        torch.tensor([t + [-1] * (longest - len(t)) for t in tables], dtype=torch.int32),
        torch.zeros(int(starts[-1]), dtype=torch.int64),
        max(queries for queries, _ in lengths),
        max(tokens for _, tokens in lengths),
    )
    shape = (int(starts[-1]), dims.heads + 1, dims.key + dims.rotated)
    query = torch.randn(shape, generator=draw).to(dtype)[:, 1:]
    keys, values = (
        (torch.randn((dims.heads, outputs, dims.latent), generator=draw) * dims.latent**-0.5).to(
            dtype
        )
        for outputs in (dims.key, dims.value)
    )
    packed = PackedLatents(
        *map(native.latents.pack, (keys.transpose(1, 2), keys, values)), dims.value, dims.rotated
    )
    options["scale"] = shape[2] ** -0.5
    found = native.latent_attention(query, cache, metadata, packed, **options, **scale)
    true = plain.float() * scale.get("key_scale", 1)
    expected = reference.latent_attention(query.float(), true, metadata, keys, values, **options)
    assert found.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def first_seen(position, sliding_window=None, chunk=None, **_):
    if sliding_window is not None:
        return max(0, position - sliding_window + 1)
    return 0 if chunk is None else position - position % chunk


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_sizes_of_deepseek_v3(native, lengths, dtype):
    check(native, DEEPSEEK, lengths, dtype=dtype)


@st.composite
def sequences(draw):
    tokens = draw(st.integers(1, 250))
    return draw(st.just(1) | st.integers(1, tokens)), tokens


@given(
    dims=st.builds(
        Dims,
        heads=st.integers(1, 5),
        latent=st.integers(1, 12).map(lambda units: 8 * units),
        key=st.integers(1, 12).map(lambda units: 8 * units),
        rotated=st.integers(1, 8).map(lambda units: 8 * units),
        value=st.integers(1, 12).map(lambda units: 8 * units),
    ),
    lengths=st.lists(
        st.integers(1, 250).flatmap(
            lambda n: st.tuples(st.just(1) | st.integers(1, n), st.just(n))
        ),
        min_size=1,
        max_size=4,
    ),
    sight=st.sampled_from([{}, {"sliding_window": 5}, {"sliding_window": 90}, {"chunk": 64}]),
    soft_cap=st.none() | st.floats(0.5, 30),
    dtype=st.sampled_from(list(TOLERANCES)),
    kept_as=st.sampled_from([None, torch.float8_e4m3fn, torch.float8_e5m2]),
    block_size=st.sampled_from([8, 16, 64, 256]),
    seed=st.integers(0, 99),
)
@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_sizes(native, dims, lengths, sight, soft_cap, dtype, kept_as, block_size, seed):
    check(
        *(native, dims, lengths),
        dtype=dtype,
        kept_as=kept_as,
        block_size=block_size,
        seed=seed,
        soft_cap=soft_cap,
        **sight,
    )


def test_a_block_that_is_not_there_is_refused(native):
    cache = torch.zeros((2, 1, 16, 16))
    weight = torch.zeros((1, 8, 8))
    packed = PackedLatents(*[native.latents.pack(weight)] * 3, 8, 8)
    metadata = AttentionMetadata(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([20], dtype=torch.int32),
        torch.tensor([[0, 2]], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        1,
        20,
    )
    with pytest.raises(IndexError, match="block table of sequence 0"):
        native.latent_attention(torch.zeros((1, 1, 16)), cache, metadata, packed, scale=1.0)
