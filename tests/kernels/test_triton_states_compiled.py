"""Compiles the kernels of stateful layers for GPUs that this machine lacks: no loop spills."""

import pytest
import torch

triton = pytest.importorskip("triton")

from octavo.kernels.triton import chunks  # noqa: E402
from octavo.kernels.triton.causal_conv import causal_conv_kernel  # noqa: E402
from octavo.kernels.triton.delta_chunks import prepare_delta_kernel  # noqa: E402
from octavo.kernels.triton.gated_delta import WARPS as DELTA_WARPS  # noqa: E402
from octavo.kernels.triton.gated_delta import gated_delta_kernel  # noqa: E402
from octavo.kernels.triton.selective_scan import WARPS as SCAN_WARPS  # noqa: E402
from octavo.kernels.triton.selective_scan import selective_scan_kernel  # noqa: E402
from octavo.kernels.triton.ssd import WARPS as SSD_WARPS  # noqa: E402
from octavo.kernels.triton.ssd import ssd_kernel  # noqa: E402
from octavo.kernels.triton.ssd_chunks import prepare_ssd_kernel  # noqa: E402
from tests.kernels.compiling import A100, H100, compile_for  # noqa: E402
from tests.kernels.sass import resources, spills_in_loops  # noqa: E402
from tests.kernels.test_triton_compiled_amd import MI300X, RX_7900, read  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted: there is nothing to compile", allow_module_level=True)

ROWS = {"state": "*fp32"} | dict.fromkeys(("tables", "query_starts", "seq_lens"), "*i32")
NUMBERS = dict.fromkeys(("least_dt", "greatest_dt", "scale"), "fp32")
SKIPS = {"HAS_D": True, "HAS_BIAS": True, "SOFTPLUS": True}
HEADS = ("query", "key", "value", "out")
MATRICES = ("mixing", "solved", "factors")
CHUNKED = {"CHUNK": chunks.CHUNK, "FEW": chunks.FEW, "UPCAST": False}
FINDS = CHUNKED | {"SEQS": chunks.SEQS}
KERNELS = {
    "causal_conv": (
        *(causal_conv_kernel, ("x", "weight", "bias", "out", "state"), (), 4),
        {"WIDTH": 4, "PADDED_WIDTH": 4, "TOKENS": 16, "CHANNELS": 64}
        | {"HAS_BIAS": True, "SILU": True},
    ),
    "ssd": (
        *(ssd_kernel, ("x", "b", "c", "dt", "out"), ("a", "d", "dt_bias"), SSD_WARPS),
        {"HEAD_DIM": 64, "STATE_SIZE": 128, "GROUP": 8, "DIMS": 16, "PADDED_SIZE": 128}
        | SKIPS
        | {"MOST": 16},
    ),
    "gated_delta": (
        *(gated_delta_kernel, ("query", "key", "value", "beta", "out"), ("g",), DELTA_WARPS),
        {"KEY_DIM": 128, "VALUE_DIM": 128, "GROUP": 2, "PADDED_KEY": 128, "VALUES": 8}
        | {"EPSILON": 1e-6, "DECAYS": 1, "ELEMENTWISE": False, "NORMALIZE": True, "MOST": 16},
    ),
    "selective_scan": (
        *(selective_scan_kernel, ("x", "dt", "b", "c", "out"), ("a", "d", "dt_bias"), SCAN_WARPS),
        {"STATE_SIZE": 16, "PADDED_SIZE": 16, "CHANNELS": 64} | SKIPS,
    ),
    "prepare_delta": (
        *(prepare_delta_kernel, ("query", "key"), ("g", "beta", *MATRICES), chunks.WARPS),
        {"KEY_DIM": 128, "GROUP": 2, "PADDED_KEY": 128, "EPSILON": 1e-6, "NORMALIZE": True} | FINDS,
    ),
    "prepare_ssd": (
        *(prepare_ssd_kernel, ("b", "c"), ("dt", "a", "dt_bias", *MATRICES), chunks.WARPS),
        {"STATE_SIZE": 128, "GROUP": 8, "PADDED_SIZE": 128, "HAS_BIAS": True, "SOFTPLUS": True}
        | FINDS,
    ),
    "scan_deltas": (
        *(chunks.scan_kernel, HEADS, MATRICES, chunks.WARPS),
        {"KEY_DIM": 128, "VALUE_DIM": 128, "GROUP": 2, "PADDED_KEY": 128, "KEYS_FIRST": True}
        | {"VALUES": chunks.values_per_program(128, 128, delta=True)}
        | {"DELTA": True, "HAS_SKIP": False, "skip": None}
        | CHUNKED,
    ),
    "scan_ssd": (
        *(chunks.scan_kernel, HEADS, ("skip", *MATRICES), chunks.WARPS),
        {"KEY_DIM": 128, "VALUE_DIM": 64, "GROUP": 8, "PADDED_KEY": 128, "KEYS_FIRST": False}
        | {"VALUES": chunks.values_per_program(128, 64, delta=False)}
        | {"DELTA": False, "HAS_SKIP": True, "solved": None}
        | CHUNKED,
    ),
}
CASES = [(name, {}) for name in KERNELS] + [
    ("gated_delta", {"DECAYS": 128, "ELEMENTWISE": True}),
    ("gated_delta", {"KEY_DIM": 96, "VALUE_DIM": 192}),
    ("gated_delta", {"KEY_DIM": 256, "PADDED_KEY": 256, "VALUES": 8}),
    ("ssd", {"STATE_SIZE": 256, "PADDED_SIZE": 256, "DIMS": 8}),
    ("prepare_delta", {"KEY_DIM": 96}),
    ("prepare_ssd", {"STATE_SIZE": 256, "PADDED_SIZE": 256}),
    ("scan_deltas", {"KEY_DIM": 96, "VALUE_DIM": 192}),
    ("scan_ssd", {"KEY_DIM": 256, "PADDED_KEY": 256, "VALUES": 16}),
]
SLOW = pytest.mark.slow
each = pytest.mark.parametrize(
    ("name", "changes"),
    [pytest.param(*case, marks=[SLOW] if case[1] else []) for case in CASES],
    ids=[name + "".join(f"-{key}" for key in changes) for name, changes in CASES],
)


OUTSIDE_LOOPS = 8
"""Maximum bytes of stack of a thread: for sm_80, `ssd` keeps one address there while it loops."""


@pytest.fixture(autouse=True)
def compile_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(gpu, name, changes):
    kernel, halves, floats, warps, constants = KERNELS[name]
    constants = constants | changes
    if "PRECISION" in kernel.arg_names:
        constants["PRECISION"] = chunks.precision_of(gpu)
    types = ROWS | NUMBERS | dict.fromkeys(halves, "*bf16") | dict.fromkeys(floats, "*fp32")
    types = {
        key: kind for key, kind in types.items() if key in kernel.arg_names and key not in constants
    }
    strides = [argument for argument in kernel.arg_names if argument.endswith("_stride")]
    aligned = (*(key for key, kind in types.items() if kind[0] == "*"), *strides)
    return compile_for(
        gpu, kernel, types, constants, aligned=aligned, warps=warps, large=("state",)
    )


@each
@pytest.mark.parametrize(
    "gpu", [pytest.param(A100, marks=SLOW), H100], ids=lambda gpu: gpu.name.partition(" ")[0]
)
def test_on_nvidia(gpu, name, changes, tmp_path, record_property):
    taken = resources(compiled(gpu, name, changes), tmp_path / "cubin")
    record_property("code", str(taken))
    assert not spills_in_loops(tmp_path / "cubin")
    assert taken["STACK"] <= OUTSIDE_LOOPS


@each
@pytest.mark.parametrize(
    "gpu", [MI300X, pytest.param(RX_7900, marks=SLOW)], ids=lambda gpu: gpu.arch
)
def test_on_amd(gpu, name, changes, record_property):
    if gpu == RX_7900 and "CHUNK" in KERNELS[name][0].arg_names:
        assert not chunks.fits_chunks(gpu, torch.bfloat16, 128, delta=False)
        return
    code = read(compiled(gpu, name, changes))
    record_property("code", str(code))
    assert not code.spills_in_loops
