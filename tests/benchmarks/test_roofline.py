"""The roofline of kernels' loops counts what instructions take."""

import pytest

pytest.importorskip("triton")

import triton

from benchmarks.gpu.roofline import CASES, MACHINES, examine, examine_case

A100, H100 = MACHINES


def test_the_cycles_of_instructions():
    code = [
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
        "LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64]",
        "MUFU.EX2 R1, R2",
        "FMUL R1, R1, R2",
    ]
    loop = examine(code, H100, 8)
    assert loop.cycles["products"] == 2 * 64, "two groups of four warps"
    assert loop.cycles["issue"] == 4 * 8 / 4
    assert loop.cycles["special"] == 8 * 32 / 16
    assert loop.cycles["float"] == 8 * 32 / 128
    assert loop.read == 8 * 32 * 16
    assert loop.cycles["bytes"] == pytest.approx(loop.read / H100.memory)
    assert (loop.limit, loop.overlapped) == ("bytes", 1)
    loop = examine(code, H100, 8, from_l2=True)
    assert loop.limit == "bytes"
    assert loop.cycles["bytes"] == pytest.approx(loop.read / H100.l2)
    warp = examine(["HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 4 + ["NOP"] * 8, A100, 4)
    assert warp.cycles["products"] == 32
    assert warp.overlapped == 1
    assert warp.alone == 32 / (32 + 12)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="there is nothing to compile")
def test_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    case = next(case for case in CASES if case.name == "write")
    loop = examine_case(case, A100, tmp_path)
    assert loop.limit == "bytes"
    assert loop.read >= 2 * 3 * 80 * 2, "a token's keys and values"
    assert loop.products == 0
