"""Packed linear layers against products in double precision, for every kind of CPU.

Instructions that this CPU lacks are emulated: those of x86 by emulation/immintrin.h, and 64-bit ARM
by QEMU.
"""

import ctypes
import os
import platform
import shutil
import subprocess
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.cpu import compile as compiling
from octavo.kernels.cpu import linear as native
from octavo.kernels.cpu.instruction_sets import INSTRUCTION_SETS
from octavo.kernels.cpu.linear import GROUP, LinearKernels
from tests.kernels.emulated_operators import LoadedOperators, RemoteOperators

SOURCES = Path(compiling.__file__).parent
EMULATION = Path(__file__).parent / "emulation"
AVX512 = ("__AVX512F__", "__AVX512BW__")
VNNI = (*AVX512, "__AVX512VNNI__")
BF16 = (*VNNI, "__AVX512BF16__")
AMX = (*BF16, "__AMX_TILE__", "__AMX_BF16__", "__AMX_INT8__")
X86 = {
    "sse2": ("x86-64", ()),
    "avx2": ("x86-64-v3", ()),
    "avx2-vnni": ("x86-64-v3", ("__AVXVNNI__",)),
    "avx512": ("x86-64-v3", AVX512),
    "avx512-vnni": ("x86-64-v3", VNNI),
    "avx512-bf16": ("x86-64-v3", BF16),
    "amx": ("x86-64-v3", AMX),
}
"""Instructions that the compiler may use, and those that are emulated."""
ARM = {isa.name: isa for isa in INSTRUCTION_SETS["aarch64"]}
NAMES = (
    *("linear", "linear_blocks", "stored_blocks", "round_weights", "low_rank", "step", "isa"),
    "ragged_attention",
)
KERNELS = [*(SOURCES / f"{name}.cpp" for name in NAMES), EMULATION / "torch.cpp"]
PANEL = 32
"""Maximum outputs of a panel."""

shapes = st.tuples(
    st.integers(1, 60),  # rows: less than a tile, several, and ragged
    st.integers(1, 24).map(lambda fours: 4 * fours),  # inputs: ragged vectors
    st.integers(1, 3 * PANEL),  # outputs: ragged panels
)


CPUS = [
    "native",
    *(pytest.param(name, marks=pytest.mark.slow) for name in (*X86, *ARM)),
]
"""Kinds of CPUs: this machine's, and emulated ones."""


@pytest.fixture(scope="module", params=CPUS)
def kernels(request, tmp_path_factory):
    if request.param == "native":
        if native is None:
            pytest.skip("there is no C++ compiler")
        yield native
        return
    with emulated(request.param, tmp_path_factory) as (operators, panel):
        yield LinearKernels(operators, panel)


@contextmanager
def emulated(name, tmp_path_factory):
    """Yield the operators of a kind of CPU, and the outputs of a panel."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"kernels-{name}"
    directory.mkdir(exist_ok=True)
    if name in ARM:
        operators = RemoteOperators("qemu-aarch64", for_arm(ARM[name], directory))
        assert operators.isa == name
        yield operators, operators.panel
        operators.close()
    else:
        library = ctypes.CDLL(str(for_x86(*X86[name], directory, *KERNELS)))
        library.octavo_isa.restype = ctypes.c_char_p
        assert library.octavo_isa().decode() == name
        yield LoadedOperators(library), library.octavo_panel_outputs()


def for_x86(march, emulated, directory, *sources):
    """Return the path of a library of these sources."""
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("no g++ for x86")
    flags = [f"-march={march}", *(f"-D{name}" for name in emulated)]
    if emulated:
        flags.append(f"-I{EMULATION}")
        sources = (*sources, EMULATION / "allow_amx.cpp")
    # -Bsymbolic, as this CPU's kernels are loaded globally.
    return built("g++", *flags, "-shared", "-Wl,-Bsymbolic", *sources, to=directory / "library.so")


def for_arm(isa, directory):
    """Return the path of a program that serves them."""
    compiler = "aarch64-linux-gnu-g++"
    if shutil.which(compiler) is None or shutil.which("qemu-aarch64") is None:
        pytest.skip(f"no {compiler} or no qemu-aarch64")
    sources = (EMULATION / "remote.cpp", *KERNELS)
    return built(compiler, *isa.flags, "-static", *sources, to=directory / "program")


def built(compiler, *arguments, to):
    """Compile in half the time, unless a test of any worker has; return the path."""
    flags = [flag for flag in compiling.FLAGS if not flag.startswith("-O")]
    command = [compiler, *flags, "-O1", "-Wno-psabi", f"-I{SOURCES}", *arguments, "-o", to]
    with FileLock(f"{to}.lock"):
        if not to.exists():
            subprocess.run(command, check=True)
    return to


def linear(kernels, x, outputs, panels, bias, gated=0, norm=None, epsilon=0.0, residual=None):
    """Multiply by packed weights without adapters."""
    return kernels.operators.packed_linear(
        x, outputs, panels, bias, gated, -1, norm, epsilon, residual
    )


def linear_int8(kernels, x, outputs, panels, bias, *scales_and_fused):
    """Multiply by packed weights in 8 bits without adapters."""
    scales, fused = scales_and_fused[:3], scales_and_fused[3:] or (0, None, 0.0, None)
    return kernels.operators.packed_linear_int8(
        *(x, outputs, panels, bias, *scales, fused[0], -1, *fused[1:])
    )


def case(shape, seed, dtype=torch.bfloat16):
    """Return rows to take a view of, weights and a bias."""
    rows, inputs, outputs = shape
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs + 8, generator=draw).to(dtype)[:, 4 : 4 + inputs]
    weight = torch.randn(outputs, inputs, generator=draw).to(dtype)
    return x, weight, torch.randn(outputs, generator=draw)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32])
@given(shape=shapes, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=12)
def test_a_panel_has_the_outputs_of_a_word_side_by_side(kernels, dtype, shape, seed):
    _, inputs, outputs = shape
    draw = torch.Generator().manual_seed(seed)
    # Rows of a wider weight: their stride exceeds their size.
    weight = torch.randint(-128, 128, (outputs, inputs + 4), generator=draw).to(dtype)[:, 4:]
    word = 4 // weight.element_size()
    panels = kernels.pad_outputs(weight).reshape(-1, kernels.panel, inputs // word, word)
    assert kernels.pack(weight).equal(panels.transpose(1, 2).flatten(2))
    columns = weight.t().contiguous().t()
    assert kernels.pack(columns).equal(kernels.pack(weight))


@given(shape=shapes, seed=st.integers(0, 99))
@settings(deadline=None)
def test_bfloat16(kernels, shape, seed):
    x, weight, bias = case(shape, seed)
    found = linear(kernels, x, len(bias), kernels.pack(weight), kernels.pad_outputs(bias))
    expected = x.double() @ weight.double().T + bias
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)
    packed = kernels.pack(weight), kernels.pad_outputs(bias)
    wide = kernels.operators.packed_linear_wide(x, len(bias), *packed, -1)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), expected, rtol=1e-4, atol=1e-4)


@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 130) | st.just(1024),  # a tile's rows would share few cache sets
    outputs=st.integers(1, 3 * PANEL),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=30)
def test_float32(kernels, rows, inputs, outputs, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs + seed % 2, generator=draw)[:, :inputs]
    weight, bias = (
        torch.randn(outputs, inputs, generator=draw),
        torch.randn(outputs, generator=draw),
    )
    found = linear(kernels, x, outputs, kernels.pack(weight), kernels.pad_outputs(bias))
    assert found.dtype == torch.float32
    expected = x.double() @ weight.double().T + bias
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@given(shape=shapes, seed=st.integers(0, 99), zero=st.booleans())
@settings(deadline=None)
def test_int8(kernels, shape, seed, zero):
    """Results equal the definition's exactly, except for the last rounding."""
    x, weight, bias = case(shape, seed)
    if zero:
        x[0] = 0
    scale = weight.abs().float().amax(1) / 127
    whole = (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
    draw = torch.Generator().manual_seed(seed)
    factors = 2.0 ** torch.randint(-2, 3, x.shape[1:], generator=draw)  # exact in any precision
    found = linear_int8(
        *(
            kernels,
            x,
            len(bias),
            kernels.pack(whole),
            kernels.pad_outputs(bias),
            factors,
            kernels.pad_outputs(scale),
        ),
        kernels.pad_outputs(whole.sum(1) * scale),
    )
    wide = x.float() * factors
    low = wide.amin(1, keepdim=True).clamp_max(0)
    step = ((wide.amax(1, keepdim=True).clamp_min(0) - low) / 255).clamp_min(1e-8)
    nothing = (-low / step).round()
    inverse = 1 / step
    # If an element is equally near to two bytes, either is right.
    tie = ((wide * inverse).frac().abs() - 0.5).abs() < 1e-4
    bytes_ = ((wide * inverse).round() + nothing).clamp(0, 255)
    expected = ((bytes_ - nothing).double() @ (whole * scale[:, None].double()).T) * step + bias
    slack = (tie * step).double() @ (whole.abs() * scale[:, None].double()).T
    error = (found.double() - expected).abs()
    size = torch.maximum(expected.abs(), found.double().abs())
    assert (error <= 2**-8 * size + slack + 1e-4).all()


def in_own_type(kernels, weight, bias):
    """A layer's operator, and its arguments after rows and outputs."""
    return partial(linear, kernels), (kernels.pack(weight), kernels.pad_outputs(bias))


def in_8_bits(kernels, weight, bias):
    factors = torch.linspace(0.5, 2, weight.shape[1])
    weight = weight / factors
    scale = weight.abs().amax(1).clamp_min(1e-8) / 127
    whole = (weight / scale[:, None]).round().to(torch.int8)
    scales = (factors, kernels.pad_outputs(scale), kernels.pad_outputs(whole.sum(1) * scale))
    return partial(linear_int8, kernels), (kernels.pack(whole), kernels.pad_outputs(bias), *scales)


KINDS = [(in_own_type, torch.bfloat16), (in_own_type, torch.float32), (in_8_bits, torch.bfloat16)]
each_kind = pytest.mark.parametrize(("make", "dtype"), KINDS, ids=["bfloat16", "float32", "int8"])


@each_kind
@given(
    rows=st.integers(1, 30),
    groups=st.integers(1, 5),
    outputs=st.integers(2 * PANEL, 4 * PANEL),  # enough for a sample of roundings
    normed=st.booleans(),
    tail=st.sampled_from(["", "residual", "gate"]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_fused(kernels, make, dtype, rows, groups, outputs, normed, tail, seed):
    """Fused norm, residual and gate equal separate operators before and after the product."""
    x, weight, bias = case((rows, groups * GROUP, 2 * outputs), seed, dtype)
    draw = torch.Generator().manual_seed(seed)
    norm = torch.rand(x.shape[1], generator=draw).to(dtype) + 1
    added = torch.randn(rows, 2 * outputs + 4, generator=draw).to(dtype)[:, : 2 * outputs]
    if tail == "gate":
        operator, layer = make(
            kernels,
            *(kernels.interleave(values[:outputs], values[outputs:]) for values in (weight, bias)),
        )
    else:
        operator, layer = make(kernels, weight, bias)
    found = operator(
        *(x, outputs if tail == "gate" else 2 * outputs, *layer, int(tail == "gate")),
        *(norm if normed else None, 1e-5, added if tail == "residual" else None),
    )

    # Rounded before multiplying by the norm's weights, as in transformers' models.
    rows_in = torch.nn.functional.rms_norm(x, norm.shape, eps=1e-5) * norm if normed else x
    plain, layer = make(kernels, weight, bias)
    expected = plain(rows_in, 2 * outputs, *layer).double()
    if tail == "gate":
        expected = torch.nn.functional.silu(expected[:, :outputs]) * expected[:, outputs:]
    if tail == "residual":
        expected = expected + added
    # Rows that are normed before they become bytes are rounded once more.
    rounded = 0.04 if normed and make is in_8_bits else 0.01
    tolerance = 1e-6 if dtype == torch.float32 else rounded
    assert (found.double() - expected).norm() <= tolerance * expected.norm()


@each_kind
def test_a_row_is_the_same_alone_and_among_others(kernels, make, dtype):
    """The numbers of rows cover each partial tile and several tiles."""
    inputs = 1024 if dtype == torch.float32 else 3 * GROUP  # 1024: many rows are copied
    x, weight, bias = case((40, inputs, 2 * PANEL + 5), seed=1, dtype=dtype)
    x = x.contiguous()
    operator, layer = make(kernels, weight, bias)
    alone = torch.cat([operator(row[None], len(bias), *layer) for row in x])
    for rows in range(2, 41):
        assert operator(x[:rows], len(bias), *layer).equal(alone[:rows])


@each_kind
@pytest.mark.usefixtures("two_threads")
def test_rows_of_several_blocks_are_as_those_of_one(kernels, make, dtype):
    x, weight, bias = case((300, 2048, PANEL + 5), seed=1, dtype=dtype)
    operator, layer = make(kernels, weight, bias)
    together = operator(x.contiguous(), len(bias), *layer)
    parts = [operator(part.contiguous(), len(bias), *layer) for part in x.split(50)]
    assert together.equal(torch.cat(parts))


@pytest.mark.parametrize("rows", [1, 4, 20])
@each_kind
@pytest.mark.usefixtures("two_threads")
def test_threads_share_the_outputs(kernels, make, dtype, rows):
    """One thread computes each output, so the number of threads does not change results."""
    x, weight, bias = case((rows, 2 * GROUP, 9 * PANEL + 1), seed=0, dtype=dtype)
    operator, layer = make(kernels, weight, bias)
    expected = operator(x, len(bias), *layer)
    for threads in (3, 70):  # 70: more threads than panels
        torch.set_num_threads(threads)
        assert operator(x, len(bias), *layer).equal(expected)


def test_gates_far_from_zero(kernels):
    """Gates are so negative that silu's exponential would overflow."""
    weight = torch.eye(GROUP).bfloat16()
    operator, layer = in_own_type(
        kernels, kernels.interleave(weight, weight), torch.zeros(2 * GROUP)
    )
    x = torch.linspace(-3e4, 3e4, GROUP).bfloat16()[None]
    found = operator(x, GROUP, *layer, 1)
    expected = torch.nn.functional.silu(x.double()) * x.double()
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-25)
