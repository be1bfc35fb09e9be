"""Test the C++ kernels of CPUs against their definitions."""

import math
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.kernels import cpu
from octavo.kernels.cpu import build
from octavo.kernels.cpu.native import NativeKernels
from octavo.kernels.reference import rotate
from octavo.kernels.sampling_tensors import SamplingTensors
from tests.kernels.conftest import without_subnormals

pytestmark = pytest.mark.usefixtures("two_threads")

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
fixtures_are_shared = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="session")
def native():
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    return NativeKernels()


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=15)
def test_attention(harness, native, data):
    harness.check_attention(native, data.draw(harness.cases(fp8=FP8, subnormals=False)))


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=10)
def test_attention_to_whole_numbers(harness, native, data):
    harness.check_attention(native, data.draw(harness.cases(whole=[torch.int8])))


def test_whole_numbers_are_the_same_written_at_once_or_one_by_one(harness, native):
    kept_as = torch.int8
    case = harness.case(
        lengths=[(1, 1)], num_kv_heads=5, head_dim=40, dtype=torch.bfloat16, cache_dtype=kept_as
    )
    slots, draw = torch.randperm(160), torch.Generator().manual_seed(2)
    memories = [torch.zeros((10, 2, harness.elements(case, kept_as)), dtype=kept_as)] * 2
    tokens = [torch.randn((160, 5, 40), generator=draw).bfloat16() for _ in range(2)]
    memories = [memory.clone() for memory in memories]
    native.write_kv(*tokens, *harness.carve(memories[0], case), slots)
    for i in range(160):
        one = slice(i, i + 1)
        rows = [x[one] for x in tokens]
        native.write_kv(*rows, *harness.carve(memories[1], case), slots[one])
    assert torch.equal(*memories)


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 300)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    values=st.integers(2, 50),
    seed=st.integers(0, 99),
)
@settings(fixtures_are_shared)
def test_argmax(native, shape, dtype, values, seed):
    """Argmax returns the first of equal maxima, also if all tokens are impossible."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(-values, 1, (shape[0], shape[1] + 3), generator=draw).to(dtype)[:, 2:-1]
    rows[0] = -torch.inf
    expected = [row.index(max(row)) for row in rows.tolist()]
    assert cpu.argmax(rows).tolist() == expected


def test_argmax_of_what_is_no_number_is_a_place(native):
    assert cpu.argmax(torch.full((2, 100), torch.nan)).tolist() == [0, 0]


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=40)
def test_masks(harness, native, data):
    harness.check_masks(cpu, *data.draw(harness.masked_rows()))


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=20)
def test_write(harness, native, data):
    cases = harness.cases(longest=20, fp8=FP8, subnormals=False)
    harness.check_write(native, data.draw(cases))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kept_as", FP8)
def test_every_number_is_rounded_to_fp8_as_pytorch_does(native, dtype, kept_as):
    """Subnormal values may differ. Each value appears equally often, at any place in the block."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    numbers = every.view(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
    largest = torch.finfo(kept_as).max
    true = without_subnormals(numbers.float() / 0.37, kept_as)
    expected = true.clamp(-largest, largest).to(kept_as).float()
    cache = torch.zeros((2, 256, 16, 8)).to(kept_as)
    native.write_kv(
        *(numbers.view(32, 256, 8), None, cache, None, torch.arange(32)), key_scale=0.37
    )
    written = cache.float().flatten()
    assert torch.equal(written.nan_to_num(6e4).sort()[0], expected.nan_to_num(6e4).sort()[0])


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=15)
def test_draws(harness, native, data):
    sizes = (1, 2, 5, 15, 16, 17, 300, 1023, 2100)
    harness.check_draws(cpu, *data.draw(harness.rows_to_draw_from(sizes, 4)))


@pytest.mark.parametrize("vocab_size", [40, 1500])  # the tokens in one chunk or in two
def test_draws_with_the_greatest_uniform_number(harness, native, vocab_size):
    harness.check_greatest_uniform(cpu, vocab_size)


@pytest.mark.parametrize(
    "spread", [2.5, *(pytest.param(other, marks=pytest.mark.slow) for other in (0.1, 8.0))]
)
@pytest.mark.parametrize(
    "cut", [{}, {"top_p": 0.95}, {"top_k": 50}, {"top_k": 40_000, "top_p": 0.9}, {"min_p": 0.05}]
)
def test_draws_from_a_whole_vocabulary(harness, native, spread, cut):
    """Flat or steep distributions, cut or not: thousands of tokens remain, or a few."""
    n = 3
    logits = spread * torch.randn((n, 49_152), generator=torch.Generator().manual_seed(3))
    draws = SamplingTensors.greedy(n)._replace(
        temperatures=np.full(n, 0.8), uniforms=np.linspace(0, 0.999, n)
    )
    cut = {name: np.full(n, value) for name, value in cut.items()}
    harness.check_draws(cpu, logits, draws._replace(**cut))


@pytest.mark.parametrize("cut", [{}, {"top_p": np.array([0.5])}, {"top_k": np.array([3])}])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_is_drawn_outside_the_vocabulary(native, value, cut):
    for vocab_size in (1000, 70):  # the smaller one last, after larger buffers
        logits = torch.full((1, vocab_size), value)
        draws = SamplingTensors.greedy(1)._replace(
            temperatures=np.ones(1), uniforms=np.full(1, 0.999), **cut
        )
        (token,) = cpu.draw_tokens(logits, draws).tolist()
        assert 0 <= token < vocab_size


@given(
    shape=st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 15, 16, 17, 300, 1023, 2100])),
    most=st.integers(0, 40) | st.just(10_000),
    spread=st.sampled_from([0.1, 3.0, 20.0]),
    ties=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(fixtures_are_shared, max_examples=40)
def test_scores(native, shape, most, spread, ties, seed):
    """Equally likely tokens are in the vocabulary's order."""
    draw = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(shape, generator=draw)
    logits = logits.round() if ties else logits
    logits[:, 1::7] = -torch.inf
    tokens = torch.randint(shape[1], shape[:1], generator=draw)
    most = min(most, shape[1])
    found = cpu.score_tokens(logits, tokens, most)
    expected = logits.log_softmax(-1)
    places = logits.sort(stable=True, descending=True).indices[:, :most]
    assert torch.equal(found.top, places)
    torch.testing.assert_close(found.logprobs, expected.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(found.top_logprobs, expected.gather(1, places))


def test_scores_of_no_numbers_are_no_numbers(native):
    scores = cpu.score_tokens(torch.full((1, 100), math.nan), torch.tensor([3]), 4)
    assert scores.logprobs.isnan().all()
    assert scores.top_logprobs.isnan().all()
    assert ((scores.top >= 0) & (scores.top < 100)).all()


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=20)
def test_rotate_and_write(harness, native, data):
    """The fused kernel equals rotating and then writing."""
    case = data.draw(harness.cases(longest=20).filter(lambda case: not case.latent))
    tokens = min(sum(queries for queries, _ in case.lengths), 4 * case.block_size)
    generator = torch.Generator().manual_seed(case.seed)

    def numbers(*shape):
        return torch.randn(shape, generator=generator).to(case.dtype)

    heads = case.num_kv_heads * case.group
    fused = numbers(tokens, heads + case.num_kv_heads, case.head_dim)
    query, key = fused.split([heads, case.num_kv_heads], 1)
    value = numbers(tokens, case.num_kv_heads + 1, case.width_of_values)[:, 1:]
    cos, sin = torch.randn(2, tokens, case.head_dim, generator=generator)
    slots = torch.randperm(4 * case.block_size, generator=generator)[:tokens]
    slots[::5] = -1
    ours = numbers(4, 2, harness.elements(case))
    theirs = ours.clone()
    found = native.rotate_and_write(query, key, value, cos, sin, *harness.carve(ours, case), slots)
    native.write_kv(rotate(key, cos, sin), value, *harness.carve(theirs, case), slots)
    tolerance = harness.tolerances[case.dtype]
    expected = rotate(query, cos, sin)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=10)
def test_copies(harness, native, data):
    harness.check_copies(native, data.draw(harness.cases(longest=20)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1500])
def test_keys_split_among_threads(harness, native, dtype, window):
    lengths = [(1, 3000), (3, 700), (1, 40)]
    harness.check_attention(
        native, harness.case(lengths=lengths, group=3, dtype=dtype, sliding_window=window)
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("window", [None, 37])
def test_many_sequences(harness, native, dtype, block_size, window):
    lengths = [(1, 1 + 7 * i) for i in range(12)] + [(3, 130), (20, 20), (2, 64)]
    sizes = {"num_kv_heads": 3, "group": 3, "block_size": block_size}
    harness.check_attention(
        native, harness.case(lengths=lengths, dtype=dtype, sliding_window=window, **sizes)
    )


LATENT = {"group": 16, "head_dim": 576, "value_dim": 512, "latent": True}


@pytest.mark.parametrize(("dtype", "block_size"), [(torch.float32, 8), (torch.bfloat16, 16)])
def test_latent_attention(harness, native, dtype, block_size):
    """Also with work split among threads."""
    case = harness.case(
        lengths=[(1, 700), (1, 1), (7, 77)], dtype=dtype, block_size=block_size, **LATENT
    )
    harness.check_attention(native, case)


@pytest.mark.parametrize(("dtype", "chunk"), [(torch.float32, 16), (torch.bfloat16, 1000)])
def test_sinks_and_chunks_split_among_threads(harness, native, dtype, chunk):
    """A sink counts once, however many parts are merged."""
    lengths = [(1, 3000), (3, 1002), (1, 1000), (1, 40)]
    harness.check_attention(
        native, harness.case(lengths=lengths, group=3, dtype=dtype, chunk=chunk, sinks=True)
    )


def test_layers_of_several_widths(harness, native):
    """Calls of different sizes share their threads' buffers."""
    for head_dim, value_dim in ((64, 64), (512, 512), (40, 128), (576, 24), (64, 64)):
        sizes = {"head_dim": head_dim, "value_dim": value_dim, "dtype": torch.bfloat16}
        harness.check_attention(native, harness.case(lengths=[(1, 99), (9, 20)], **sizes))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(harness, native, threads):
    torch.set_num_threads(threads)
    harness.check_attention(
        native, harness.case(lengths=[(1, 1200), (50, 90), (1, 200)], num_kv_heads=2, group=2)
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "other",
    [
        {},
        {"sliding_window": 300, "head_dim": 40},
        {"chunk": 700, "block_size": 8, "sinks": True},
        {"cache_dtype": torch.float8_e4m3fn, "subnormals": False},
        {"cache_dtype": torch.int8},
        {"latent": True, "head_dim": 80, "value_dim": 64},
    ],
    ids=lambda other: next(iter(other), "plain"),
)
def test_results_do_not_depend_on_how_work_is_divided(harness, native, dtype, other):
    case = harness.case(lengths=[(1100, 1100)], num_kv_heads=2, group=3, dtype=dtype, **other)
    harness.check_chunks(native, case, cuts=[3, 500, 512, 600, 1040, 1099], threads=[1, 2, 5])


@pytest.mark.parametrize("scale", [40.0, -3.0, 0.0])
def test_extreme_logits(harness, native, scale):
    """Softmax weights almost vanish, or are equal, in every tile."""
    for cap in (None, 50.0):
        harness.check_attention(
            native,
            harness.case(lengths=[(1, 3000), (20, 150)], group=2, scale=scale, soft_cap=cap),
        )


def test_nothing_to_attend_to(harness, native):
    harness.check_attention(native, harness.case(lengths=[(0, 0)]))
    harness.check_attention(native, harness.case(lengths=[(0, 0), (1, 9), (0, 30)]))
    batch = harness.build(harness.case(lengths=[(1, 4), (1, 1)]))
    batch.metadata.seq_lens[0] = 0  # as in a batch's padding
    out = native.paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.metadata, **batch.options
    )
    assert not out[0].any()
    assert out[1].any()


class TestNative:
    def test_does_not_look_at_blocks_that_no_query_sees(self, harness, native):
        for limit in ({"sliding_window": 16}, {"chunk": 32}):
            batch = harness.build(harness.case(lengths=[(1, 64)], **limit))
            given = (batch.query, batch.key_cache, batch.value_cache, batch.metadata)
            batch.metadata.block_tables[0, :2] = -5
            native.paged_attention(*given, **batch.options)
            batch.metadata.block_tables[0, 3] = -5
            with pytest.raises(IndexError, match="sequence 0"):
                native.paged_attention(*given, **batch.options)

    def test_refuses_a_block_that_does_not_exist(self, harness, native):
        for bad in (99, -1):
            batch = harness.build(harness.case(lengths=[(1, 5), (1, 40)]))
            batch.metadata.block_tables[1, 2] = bad
            with pytest.raises(IndexError, match="sequence 1, 40 tokens long"):
                native.paged_attention(
                    batch.query, batch.key_cache, batch.value_cache, batch.metadata, scale=1.0
                )

    def test_refuses_a_table_too_short(self, harness, native):
        batch = harness.build(harness.case(lengths=[(1, 5)]))
        batch.metadata.seq_lens[0] = 1000
        with pytest.raises(IndexError, match="1000 tokens long"):
            native.paged_attention(
                batch.query, batch.key_cache, batch.value_cache, batch.metadata, scale=1.0
            )

    def test_refuses_a_slot_past_the_end(self, native):
        cache = torch.zeros(2, 1, 2, 1, 8, 32)
        key = torch.ones(2, 1, 32)
        with pytest.raises(IndexError, match="token 1 goes to slot 16, of 16"):
            native.write_kv(key, key, cache[:, 0, 0], cache[:, 0, 1], torch.tensor([0, 16]))

    def test_refuses_what_it_would_misread(self, harness, native):
        batch = harness.build(harness.case(lengths=[(1, 5)]))
        operands = (batch.key_cache, batch.value_cache, batch.metadata)
        with pytest.raises(ValueError, match="tokens are float16"):
            native.paged_attention(batch.query.half(), *operands, scale=1.0)
        with pytest.raises(ValueError, match="must be contiguous"):
            native.paged_attention(
                batch.query, batch.key_cache[:, :, ::2], batch.value_cache[:, :, ::2],
                batch.metadata, scale=1.0,
            )  # fmt: skip
        with pytest.raises(ValueError, match="and none are given"):
            native.write_kv(
                batch.query[:, :1], None, *operands[:2], torch.zeros(1, dtype=torch.int64)
            )
        with pytest.raises(ValueError, match="query heads of 16"):
            native.paged_attention(batch.query[..., :16], *operands, scale=1.0)

    def test_several_python_threads(self, harness, native):
        case = harness.case(lengths=[(1, 600)] * 3 + [(40, 80)], num_kv_heads=2, group=3)
        failures = []

        def work(seed):
            try:
                for _ in range(5):
                    harness.check_attention(native, type(case)(case.lengths, seed=seed))
            except AssertionError as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    def test_runs_on_pytorchs_own_threads(self, native):
        maps = Path("/proc/self/maps")
        if not maps.exists():
            pytest.skip("no /proc")
        lines = [line for line in maps.read_text().splitlines() if "libgomp" in line]
        assert len({line.split()[-1] for line in lines}) == 1


def _load(_: int) -> str:
    return Path(build.load_compiled()._name).name


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="the cache is elsewhere")
@pytest.mark.slow
def test_of_processes_that_race_one_compiles(tmp_path, monkeypatch):
    linked = tmp_path / "linked"
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = -shared ] && echo >> {linked}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        names = pool.map(_load, range(2), chunksize=1)
    assert len(set(names)) == 1
    assert [file.name for file in (tmp_path / "cache" / "kernels").iterdir()] == names[:1]
    assert linked.read_text() == "\n"


def test_without_a_compiler(tmp_path):
    """The engine logs it once, and continues in plain PyTorch."""
    script = (
        "import logging; logging.basicConfig()\n"
        "import torch\n"
        "from octavo.kernels import ops\n"
        "cache = torch.zeros(2, 1, 2, 1, 8, 32)\n"
        "for _ in range(2):\n"
        "    ops.write_kv(torch.ones(1, 1, 32), torch.ones(1, 1, 32), cache[:, 0, 0],\n"
        "                 cache[:, 0, 1], torch.tensor([9]))\n"
        "assert cache.sum() == 64, cache.sum()\n"
        "from octavo.kernels import cpu\n"
        "assert cpu.write_kv.__module__ == 'octavo.kernels.reference'\n"
    )
    environment = os.environ | {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be compiled") == 1


def test_a_compiler_that_fails_says_why(tmp_path, monkeypatch):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(OSError, match="out of luck"):
        build.load_compiled()
