"""Out-of-bounds accesses of kernels are found; see `guarded`."""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import pytest
import torch

from tests.kernels.triton_device import INTERPRETED

triton = pytest.importorskip("triton")
tl = triton.language

if not INTERPRETED:
    pytest.skip("only the interpreter's accesses are checked", allow_module_level=True)


@triton.jit
def _copy_kernel(source, target, row_stride, first, count, columns: tl.constexpr):
    column = first + tl.arange(0, columns)
    place = tl.program_id(0) * row_stride + column
    real = column < count
    tl.store(target + place, tl.load(source + place, mask=real), mask=real)


def copy(source, target, *, rows=3, stride=8, first=0, count=5):
    _copy_kernel[(rows,)](source, target, stride, first, count, columns=8)


def test_a_kernel_that_stays_within_its_tensors_passes():
    memory = torch.arange(24.0).view(3, 8)
    copied = torch.zeros(3, 8)
    copy(memory[:, 1:6], copied[:, 1:6])
    assert torch.equal(copied[:, 1:6], memory[:, 1:6])
    assert not copied[:, 6:].any()


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ({"count": 6}, "between"),
        ({"rows": 4}, "outside"),
        ({"first": -1}, "between"),
    ],
)
@pytest.mark.parametrize("written", [False, True])
def test_an_access_outside_is_found(fault, where, written):
    memory, large = torch.zeros(3, 8)[:, 1:6], torch.zeros(8, 8)[2:, 1:]
    tensors = (large, memory) if written else (memory, large)
    with pytest.raises(Exception, match=where):
        copy(*tensors, **fault)
