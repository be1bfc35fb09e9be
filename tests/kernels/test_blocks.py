"""Layers of GGUF's block formats against products in double precision, for every kind of CPU.

The `gguf` package dequantizes the bytes. Instructions that this CPU lacks are emulated, as in
test_linear.py.
"""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.cpu import blocks as native
from octavo.kernels.cpu import linear as native_linear
from octavo.kernels.cpu.blocks import FORMATS, BlockKernels, dequantize, to_q4_1
from octavo.kernels.cpu.linear import LinearKernels
from tests.kernels.packed_blocks import pack
from tests.kernels.test_linear import CPUS, emulated


@pytest.fixture(scope="module", params=CPUS)
def kernels(request, tmp_path_factory):
    """The kernels of blocks, and those of other layers of the same CPU."""
    if request.param == "native":
        if native is None:
            pytest.skip("there is no C++ compiler")
        yield native, native_linear
        return
    with emulated(request.param, tmp_path_factory) as own:
        yield BlockKernels(*own), LinearKernels(*own)


def random_bytes(own, outputs, units, seed):
    """Draw bytes of weights: any bytes with finite scales."""
    draw = np.random.default_rng(seed)
    rows = draw.integers(0, 256, (outputs, units, own.unit_bytes), dtype=np.uint8)
    for at in (208,) if own.bits == 6 else (0, 2) if own.has_min else (0,):
        scales = draw.normal(size=(outputs, units, 1)).astype(np.float16)
        rows[..., at : at + 2] = scales.view(np.uint8)
    return torch.from_numpy(rows.reshape(outputs, -1))


def multiply(kernels, x, outputs, packed, bias, number, *fused):
    """Multiply by weights in blocks without adapters."""
    gated, *rest = fused or (0, None, 0.0, None)
    return kernels[1].operators.packed_linear_blocks(
        x, outputs, packed, bias, number, gated, -1, *rest
    )


def multiply_wide(kernels, *arguments):
    return kernels[1].operators.packed_linear_blocks_wide(*arguments, -1)


def meaning(own, rows):
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), Kind[own.name]))


@pytest.mark.parametrize("own", FORMATS.values(), ids=FORMATS)
def test_bytes_stand_for_what_gguf_says(own):
    rows = random_bytes(own, 7, 3, 1)
    assert dequantize(rows, own).equal(meaning(own, rows))


@pytest.mark.parametrize("own", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("outputs", [1, 33, None])
def test_the_file_s_bytes(kernels, own, outputs):
    """Weights are widened and packed as the definitions say, in order and reordered."""
    blocks, linear = kernels
    # One extra row, at an odd address: files do not align rows. Some scales and codes are zeros.
    rows = random_bytes(own, 71, 9 if own.is_super else 40, 5)
    rows[3::7] = 0
    rows = torch.cat([torch.zeros(1, dtype=torch.uint8), rows.flatten()])[1:].view_as(rows)
    order = None
    if outputs is not None:
        order = torch.randint(0, len(rows), (outputs,), generator=torch.Generator().manual_seed(1))
    exact = dequantize(rows, own, order=order)
    found = blocks.dequantize(rows, own, order=order)
    assert found.view(torch.int32).equal(exact.view(torch.int32))
    narrow = blocks.dequantize(rows, own, torch.bfloat16, order)
    assert narrow.view(torch.int16).equal(exact.bfloat16().view(torch.int16))
    expected = pack(rows if order is None else rows[order], own, linear.panel)
    assert blocks.pack(rows, own, order).equal(expected)


@pytest.mark.parametrize("read", ["dequantize", "pack"])
@pytest.mark.parametrize("outside", [-1, 7])
def test_there_must_be_a_row_of_each_output(kernels, read, outside):
    own = FORMATS["Q4_0"]
    with pytest.raises(IndexError, match="an output is in none of 7 rows"):
        getattr(kernels[0], read)(random_bytes(own, 7, 3, 1), own, order=torch.tensor([outside]))


@pytest.mark.parametrize("own", FORMATS.values(), ids=FORMATS)
def test_no_more_memory_than_the_file(kernels, own):
    blocks, linear = kernels
    rows = random_bytes(own, 2 * linear.panel, 3, 1)
    assert blocks.pack(rows, own).nbytes <= 1.03 * rows.nbytes


@pytest.mark.parametrize("own", FORMATS.values(), ids=FORMATS)
@given(
    rows=st.integers(1, 20),
    units=st.integers(1, 3),
    outputs=st.integers(1, 80),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=12)
def test_products(kernels, own, rows, units, outputs, seed):
    blocks, linear = kernels
    weight = random_bytes(own, outputs, units, seed)
    exact = meaning(own, weight)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, exact.shape[1] + 8, generator=draw).bfloat16()[:, 4:-4]
    bias = torch.randn(outputs, generator=draw)
    packed, padded = blocks.pack(weight, own), linear.pad_outputs(bias)
    expected = x.double() @ exact.double().T + bias
    found = multiply(kernels, x, outputs, packed, padded, own.number)
    wide = multiply_wide(kernels, x, outputs, packed, padded, own.number)
    assert (found.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert found.equal(wide.bfloat16())
    # Each group of inputs is rounded to 255 steps, with errors up to half a step.
    groups = x.double().abs().unflatten(1, (-1, own.group)).amax(-1) / 254
    steps = groups.repeat_interleave(own.group, 1)
    worst = steps @ exact.double().abs().T
    size = x.double().abs() @ exact.double().abs().T
    assert ((wide - expected).abs() <= 1.01 * worst + 1e-5 * size + 1e-4).all()
    usual = (steps**2 @ exact.double().T ** 2).sqrt()
    assert (wide - expected).norm() <= 1.5 * usual.norm() + 1e-5 * size.norm()
    # Rows in float32 are not rounded.
    exactly = multiply(kernels, x.float(), outputs, packed, padded, own.number)
    size = x.double().abs() @ exact.double().abs().T + bias.abs()
    assert exactly.dtype == torch.float32
    assert ((exactly - expected).abs() <= 1e-6 * size + 1e-6).all()


@pytest.mark.parametrize("own", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_the_same_alone_and_among_others(kernels, own, dtype):
    """The numbers of rows cover each partial tile and several tiles."""
    blocks, linear = kernels
    weight = random_bytes(own, 69, 2, 3)
    x = torch.randn(30, meaning(own, weight).shape[1], generator=torch.Generator().manual_seed(3))
    x = x.to(dtype)
    layer = (69, blocks.pack(weight, own), linear.pad_outputs(torch.zeros(69)), own.number)
    alone = torch.cat([multiply_wide(kernels, row[None], *layer) for row in x])
    for rows in range(2, 31):
        assert multiply_wide(kernels, x[:rows], *layer).equal(alone[:rows])


def test_codes_of_4_bits_become_q4_1():
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (5, 3, 32), generator=draw)
    scale, least = torch.randn(2, 5, 3, generator=draw).half()
    rows = to_q4_1(codes, scale, least)
    exact = codes * scale.float()[..., None] + least.float()[..., None]
    assert dequantize(rows, FORMATS["Q4_1"]).equal(exact.flatten(1))


@pytest.mark.parametrize("own", FORMATS.values(), ids=FORMATS)
def test_embeddings(kernels, own):
    blocks, linear = kernels
    embed, embed_wide = (
        linear.operators.packed_embedding,
        linear.operators.packed_embedding_wide,
    )
    rows = random_bytes(own, 70, 2, 3)
    exact, packed = meaning(own, rows), blocks.pack(rows, own)
    ids = torch.tensor([69, 0, 33, 0])
    assert embed_wide(ids, exact.shape[1], packed, own.number).equal(exact[ids])
    narrow = embed(ids, exact.shape[1], packed, own.number)
    assert narrow.equal(exact[ids].bfloat16())
    for outside in (-1, 4000):
        with pytest.raises(IndexError, match="outside of the vocabulary"):
            embed(torch.tensor([outside]), exact.shape[1], packed, own.number)


@pytest.mark.parametrize("own", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("rows", [3, 12])
@pytest.mark.parametrize("tail", ["residual", "gate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused(kernels, own, rows, tail, dtype):
    """Fused norm, residual and gate equal separate operators before and after the product."""
    blocks, linear = kernels
    weight = random_bytes(own, 80, 2, 5)
    exact = meaning(own, weight).double()
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(rows, exact.shape[1], generator=draw).to(dtype)
    norm = torch.rand(x.shape[1], generator=draw).to(dtype) + 1
    added = torch.randn(rows, 80, generator=draw).to(dtype)
    bias = torch.randn(80, generator=draw)
    gated = tail == "gate"
    normed = (torch.nn.functional.rms_norm(x, norm.shape, eps=1e-5) * norm).double()
    expected = normed @ exact.T + bias
    if gated:
        expected = torch.nn.functional.silu(expected[:, :40]) * expected[:, 40:]
        weight, bias = (linear.interleave(part[:40], part[40:]) for part in (weight, bias))
    else:
        expected = expected + added
    found = multiply(
        *(kernels, x, 40 if gated else 80, blocks.pack(weight, own), linear.pad_outputs(bias)),
        *(own.number, int(gated), norm, 1e-5, None if gated else added),
    )
    tolerance = 1e-6 if dtype == torch.float32 else 0.03
    assert (found.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("own", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.usefixtures("two_threads")
def test_threads_share_the_outputs(kernels, own, rows):
    """One thread computes each output, so the number of threads does not change results."""
    blocks, linear = kernels
    weight = random_bytes(own, outputs := 289, 1, 3)
    x = torch.randn(rows, meaning(own, weight).shape[1]).bfloat16()
    layer = (blocks.pack(weight, own), linear.pad_outputs(torch.zeros(outputs)), own.number)
    expected = multiply(kernels, x, outputs, *layer)
    for threads in (3, 70):  # 70: more threads than panels
        torch.set_num_threads(threads)
        assert multiply(kernels, x, outputs, *layer).equal(expected)
