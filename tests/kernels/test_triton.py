"""The Triton kernels against the reference: see `triton_device`."""

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.kernels import reference
from octavo.kernels.gpu import E4M3_DTYPES, describe_gpu
from octavo.kernels.sampling_tensors import SamplingTensors
from tests.kernels.triton_device import DEVICE, INTERPRETED, MARKS

triton = pytest.importorskip("triton")

FOUND = torch.cuda.is_available()
# A GPU has one type of e4m3 or none; the interpreter has all, AMD's own from Triton 3.9 on.
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
KNOWN = [dtype for dtype in E4M3_DTYPES if not (OLD and dtype == torch.float8_e4m3fnuz)]
E4M3 = KNOWN if INTERPRETED else [describe_gpu(torch.device(DEVICE)).e4m3] if FOUND else []
FP8 = [dtype for dtype in (*E4M3, torch.float8_e5m2) if dtype is not None]
# On a GPU, almost every example is compiled first.
MAX_EXAMPLES = 10 if INTERPRETED else 20

pytestmark = MARKS

fixtures_are_shared = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="session")
def kernels():
    from octavo.kernels import triton

    return triton


def check_rotation(harness, kernels, case):
    tokens = min(sum(queries for queries, _ in case.lengths), 4 * case.block_size)
    generator = torch.Generator().manual_seed(case.seed)

    def numbers(*shape):
        return torch.randn(shape, generator=generator).to(case.dtype).to(DEVICE)

    heads = case.num_kv_heads * case.group
    fused = numbers(tokens, heads + case.num_kv_heads, case.head_dim)
    query, key = fused.split([heads, case.num_kv_heads], 1)
    value = numbers(tokens, case.num_kv_heads + 1, case.width_of_values)[:, 1:]
    angles = numbers(2, tokens, case.head_dim)
    if case.cache_dtype is not None:
        # Quarter turns of fp8 values need no rounding, which the interpreter does wrong.
        for x in (fused, value):
            x.copy_(x.to(case.cache_dtype))
        quarters = torch.randint(4, angles.shape[1:], generator=generator).to(DEVICE)
        angles = torch.tensor([[1, 0, -1, 0], [0, 1, 0, -1]], device=DEVICE)[:, quarters]
        angles = angles.to(case.dtype)
    slots = torch.randperm(4 * case.block_size, generator=generator)[:tokens].to(DEVICE)
    slots[::5] = -1
    ours = numbers(4, 2, harness.elements(case)).to(case.kept_as)
    theirs = ours.clone()
    found, expected = (
        run.rotate_and_write(
            query, key, value, *angles, *harness.carve(cache, case), slots, **case.scales
        )
        for run, cache in ((kernels, ours), (reference, theirs))
    )
    tolerance = 0.0 if case.cache_dtype else harness.tolerances[case.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours.float(), theirs.float(), atol=tolerance, rtol=tolerance)


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=MAX_EXAMPLES)
def test_masks(harness, kernels, data):
    harness.check_masks(kernels, *data.draw(harness.masked_rows()), DEVICE)


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=4 if INTERPRETED else MAX_EXAMPLES)
def test_attention(harness, kernels, data):
    sizes = (40, 120, 3) if INTERPRETED else (300, 1400, 9)
    case = data.draw(harness.cases(*sizes, fp8=FP8))
    splits = data.draw(st.none() | st.integers(1, 8))
    harness.check_attention(kernels, case, DEVICE, splits)


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=4 if INTERPRETED else MAX_EXAMPLES)
def test_attention_to_whole_numbers(harness, kernels, data):
    sizes = (40, 120, 3) if INTERPRETED else (300, 1400, 9)
    case = data.draw(harness.cases(*sizes, whole=[torch.int8]))
    splits = data.draw(st.none() | st.integers(1, 8))
    harness.check_attention(kernels, case, DEVICE, splits)


def test_whole_numbers_round_ties_to_even(harness, kernels):
    """Halves of a scale in bfloat16 are frequent among values in float16."""
    case = harness.case(
        [(1, 3)], 1, 1, 8, 512, dtype=torch.float16, seed=31, cache_dtype=torch.int8
    )
    harness.check_attention(kernels, case, DEVICE)


def test_rotated_keys_in_whole_numbers(harness, kernels):
    case = harness.case(
        lengths=[(1, 1)], num_kv_heads=3, group=2, head_dim=40, value_dim=24, cache_dtype=torch.int8
    )
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn((20, heads, dim), generator=generator).to(DEVICE)
        for heads, dim in ((6, 40), (3, 40), (3, 24))
    )
    # Quarter turns need no rounding.
    quarters = torch.randint(4, (20, 40), generator=generator).to(DEVICE)
    cos, sin = torch.tensor([[1.0, 0, -1, 0], [0, 1, 0, -1]], device=DEVICE)[:, quarters]
    slots = torch.randperm(48, generator=generator)[:20].to(DEVICE)
    slots[::5] = -1
    ours = torch.zeros((3, 2, harness.elements(case, torch.int8)), dtype=torch.int8, device=DEVICE)
    theirs = ours.clone()
    found = kernels.rotate_and_write(query, key, value, cos, sin, *harness.carve(ours, case), slots)
    assert torch.equal(found, reference.rotate(query, cos, sin))
    rotated = reference.rotate(key, cos, sin)
    kernels.write_kv(rotated, value, *harness.carve(theirs, case), slots)
    assert ours.any()
    assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@given(data=st.data())
@settings(fixtures_are_shared, max_examples=10 * MAX_EXAMPLES)
def test_sweep(harness, kernels, data):
    """Every kernel works with the engine's sizes."""
    case = data.draw(harness.cases(longest=600, most_rows=1200, most_sequences=9, fp8=FP8))
    splits = data.draw(st.none() | st.integers(1, 8))
    harness.check_attention(kernels, case, DEVICE, splits)
    harness.check_write(kernels, case, DEVICE, rounds=not INTERPRETED)
    harness.check_copies(kernels, case, DEVICE)
    if not case.latent:
        check_rotation(harness, kernels, case)
    rows = data.draw(harness.rows_to_draw_from((1, 2, 100, 1025, 3000), 6))
    harness.check_draws(kernels, *rows, DEVICE)


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=MAX_EXAMPLES // 5)
def test_write(harness, kernels, data):
    case = data.draw(harness.cases(longest=20, fp8=FP8))
    # The interpreter does not round to the nearest fp8.
    harness.check_write(kernels, case, DEVICE, rounds=not INTERPRETED)


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=MAX_EXAMPLES // 5)
def test_rotate_and_write(harness, kernels, data):
    cases = harness.cases(longest=20, fp8=FP8).filter(lambda case: not case.latent)
    check_rotation(harness, kernels, data.draw(cases))


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=1 if INTERPRETED else MAX_EXAMPLES)
def test_copies(harness, kernels, data):
    harness.check_copies(kernels, data.draw(harness.cases(longest=20)), DEVICE)


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=MAX_EXAMPLES // 2)
def test_draws(harness, kernels, data):
    sizes = (1, 2, 5, 700, 1024) if INTERPRETED else (1, 2, 5, 1024, 3000, 32_000)
    rows = data.draw(harness.rows_to_draw_from(sizes, 2 if INTERPRETED else 9))
    harness.check_draws(kernels, *rows, DEVICE)


def test_draws_from_a_row_of_several_tiles(harness, kernels):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9000, generator=generator).round()
    draws = SamplingTensors(
        temperatures=np.array([0.9, 1.0]),
        top_k=np.array([0, 5000]),
        top_p=np.array([0.9, 1.0]),
        min_p=np.array([0.0, 0.05]),
        uniforms=np.array([0.99, 0.6]),
    )
    harness.check_draws(kernels, logits, draws, DEVICE)


@pytest.mark.parametrize("vocab_size", [40, 5000])  # the tokens in one tile or in two
def test_draws_with_the_greatest_uniform_number(harness, kernels, vocab_size):
    harness.check_greatest_uniform(kernels, vocab_size, DEVICE)


@pytest.mark.parametrize("programs", [1, 2])
def test_copies_of_blocks_larger_than_a_grid(kernels, monkeypatch, programs):
    module = importlib.import_module("octavo.kernels.triton.copy_blocks")
    monkeypatch.setattr(module, "_MAX_PROGRAMS", programs)
    words = 5 * module._WORDS + 3
    cache = torch.randn((4, words), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = cache.clone()
    expected[1], expected[3] = cache[0], cache[2]
    kernels.copy_blocks(cache, torch.tensor([[0, 1], [2, 3]]))
    assert torch.equal(cache, expected)


def test_zero_is_as_likely_as_minus_zero(harness, kernels):
    logits = torch.tensor([[-0.0, 0.0, -1.0]])
    draws = SamplingTensors.greedy(1)._replace(temperatures=np.ones(1), top_p=np.array([0.01]))
    harness.check_draws(kernels, logits, draws, DEVICE)


def test_nothing_is_drawn_outside_the_vocabulary(kernels):
    logits = torch.full((3, 70), torch.nan)
    logits[1] = -torch.inf
    logits[2, 3:] = torch.inf
    draws = SamplingTensors.greedy(3)._replace(
        temperatures=np.ones(3), top_p=np.array([1, 0.5, 0.5])
    )
    assert all(0 <= token < 70 for token in kernels.draw_tokens(logits.to(DEVICE), draws).tolist())


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.float32, torch.float16)),
    ],
)
def test_mixed_batch(harness, kernels, dtype):
    harness.check_attention(
        kernels,
        harness.case(
            lengths=[(1, 130), (50, 90), (1, 1), (23, 23)],
            num_kv_heads=3,
            group=3,
            head_dim=64,
            dtype=dtype,
        ),
        DEVICE,
    )


@pytest.mark.parametrize(
    "cache_dtype", [*FP8[-1:], *(pytest.param(each, marks=pytest.mark.slow) for each in FP8[:-1])]
)
def test_fp8(harness, kernels, cache_dtype):
    case = harness.case(
        lengths=[(1, 90), (40, 60)], group=2, dtype=torch.bfloat16, cache_dtype=cache_dtype
    )
    harness.check_attention(kernels, case, DEVICE)
    harness.check_write(kernels, case, DEVICE, rounds=not INTERPRETED)


@pytest.mark.parametrize("size", [2.0**-30, 2.0**30])
def test_fp8_with_queries_beyond_float16(harness, kernels, size):
    case = harness.case(
        lengths=[(1, 90), (40, 60)],
        group=2,
        dtype=torch.bfloat16,
        cache_dtype=torch.float8_e5m2,
    )
    batch = harness.build(case, DEVICE)
    batch.query[::3] = 0
    inputs = (batch.key_cache, batch.value_cache, batch.metadata)
    options = batch.options | {"scale": batch.options["scale"] / size}
    out = kernels.paged_attention(batch.query * size, *inputs, **options)
    expected = reference.paged_attention(batch.query.float() * size, *inputs, **options)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("splits", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_keys_shared_out_among_programs(harness, kernels, splits):
    lengths = [(1, 200), (1, 0), (1, 1), (9, 140)]
    for window in (None, 40):
        case = harness.case(lengths=lengths, num_kv_heads=2, group=2, sliding_window=window)
        harness.check_attention(kernels, case, DEVICE, splits)


@pytest.mark.parametrize("seed", [2, 3])  # with and without an entry behind the longest sequence
def test_blocks_of_several_tiles(harness, kernels, seed):
    """The block of the tile behind the last one is not read; see `guarded`."""
    case = harness.case(lengths=[(1, 100), (3, 256)], group=2, block_size=128, seed=seed)
    harness.check_attention(kernels, case, DEVICE)


def test_sequences_of_very_different_lengths(harness, kernels):
    """The long ones are cut into pieces of their own number, the short ones are whole."""
    lengths = [(1, 20), (1, 1300), (1, 1), (1, 700), (9, 30), (5, 900)]
    case = harness.case(lengths=lengths, num_kv_heads=2, group=2, sinks=True)
    queries, tokens = np.array(lengths).T
    plan = kernels.plan_attention(queries, tokens, harness.attention_shape(case, DEVICE))
    if INTERPRETED:
        assert set(plan.items[: plan.num_decode_items, 3].tolist()) > {1}
        assert plan.num_chunk_pieces
    harness.check_attention(kernels, case, DEVICE, plan=plan)


@pytest.mark.parametrize(
    "window", [3, *(pytest.param(wide, marks=pytest.mark.slow) for wide in (None, 40))]
)
def test_fewer_queries_than_are_planned_for(harness, kernels, window):
    """Plans have room as in CUDA graphs with drafts: the last sequence is padding."""
    lengths = [(9, 70), (1, 100), (1, 64), (3, 9), (0, 0), (31, 0)]
    case = harness.case(lengths=lengths, num_kv_heads=2, group=4, sliding_window=window)
    harness.check_attention(kernels, case, DEVICE, splits=2, planned=[9] * 5 + [45])


@pytest.fixture
def uninitialized_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialized_is_nan")
@pytest.mark.parametrize("window", [40, pytest.param(None, marks=pytest.mark.slow)])
def test_any_batch_fits_into_a_plan_with_room(harness, kernels, monkeypatch, window):
    """Plans have room as in mixed CUDA graphs: the fifth sequence has the remaining rows."""
    monkeypatch.setattr("octavo.kernels.triton.splits.MAX_WAVES", {"decode": 1, "chunk": 1})
    case = harness.case(lengths=[], group=2, sliding_window=window)
    shape = harness.attention_shape(case, DEVICE)
    room = kernels.plan_room(4, 2, 30, shape)
    room, idle = replace(room, splits=2), room.items.clone()
    full = np.array([(1, 70), (1, 90), (26, 90), (2, 64)]).T
    room.take(kernels.plan_attention(*full, shape, splits=1), idle)
    some = [(9, 40), (1, 70)]
    room.take(kernels.plan_attention(*np.array(some).T, shape, splits=2), idle)
    case = replace(case, lengths=[*some, (0, 0), (0, 0), (20, 0)])
    harness.check_attention(kernels, case, DEVICE, plan=room)
    with pytest.raises(ValueError, match="room for"):
        room.take(kernels.plan_attention(*full, shape, splits=room.num_decode_pieces), idle)


def test_latent_attention(harness, kernels):
    case = harness.case(
        lengths=[(1, 90), (3, 40)], group=16, head_dim=576, value_dim=512, latent=True
    )
    harness.check_attention(kernels, case, DEVICE, splits=3)


@pytest.mark.parametrize(("chunk", "splits"), [(16, 1), (100, 4)])
def test_sinks_and_chunks(harness, kernels, chunk, splits):
    """A sink counts once, however many pieces are merged."""
    case = harness.case(lengths=[(1, 190), (30, 110)], group=2, chunk=chunk, sinks=True)
    harness.check_attention(kernels, case, DEVICE, splits)


def test_more_heads_to_a_kv_head_than_a_tile_has_rows(harness, kernels):
    case = harness.case(lengths=[(1, 40), (3, 30)], group=71, head_dim=256)
    harness.check_attention(kernels, case, DEVICE, splits=2)


@pytest.mark.parametrize("scales", [{"scale": 0.0}, {"scale": -1.0}, {"key_scale": 0.0}])
def test_scales_are_positive(harness, kernels, scales):
    batch = harness.build(harness.case(lengths=[(1, 9)]), DEVICE)
    options = batch.options | scales
    with pytest.raises(ValueError, match="scales must be positive"):
        kernels.paged_attention(
            batch.query, batch.key_cache, batch.value_cache, batch.metadata, **options
        )


@pytest.mark.parametrize(
    "window", [5, 64, *(pytest.param(other, marks=pytest.mark.slow) for other in (1, 100))]
)
def test_window_skips_tiles(harness, kernels, window):
    lengths = [(1, 200), (70, 200)]
    harness.check_attention(
        kernels, harness.case(lengths=lengths, group=2, sliding_window=window), DEVICE
    )


def test_nothing_to_attend_to(harness, kernels):
    harness.check_attention(kernels, harness.case(lengths=[(0, 0)]), DEVICE)
    harness.check_attention(kernels, harness.case(lengths=[(0, 0), (1, 9), (0, 30)]), DEVICE)
