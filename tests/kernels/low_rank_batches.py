"""Random batches of rows with adapters, and the check of a kernel against the definition."""

from types import ModuleType

import numpy as np
import torch

from octavo.kernels import reference
from octavo.kernels.low_rank import RECORD, make_record, sort_rows

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def check_low_rank(
    kernels: ModuleType,
    *,
    inputs: int,
    outputs: int,
    ranks: list[int],
    num_rows: int,
    dtype: torch.dtype,
    wide: bool,
    seed: int,
    device: str = "cpu",
) -> None:
    """Compare a backend with the definition.

    Rows of `x` and `out` are strided, as in fused layers; a rank of 0 does not adapt the layer, and
    the last row has no adapter.
    """
    draw = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=draw)

    adapters = torch.randint(-1, len(ranks), (num_rows,), generator=draw)
    adapters[-1] = -1
    matrices = [
        ((randn(rank, inputs) / inputs**0.5).to(dtype), randn(outputs, rank).to(dtype), 0.5 + rank)
        if rank
        else None
        for rank in ranks
    ]
    x = randn(num_rows, inputs + 3).to(dtype)
    out = randn(num_rows, outputs + 5).to(torch.float32 if wide else dtype)
    expected = out.clone()
    reference.add_low_rank(expected[:, 1:-4], x[:, 2:-1], adapters.tolist(), matrices)
    owners, records = [], np.zeros((2, len(ranks), RECORD), np.int64)  # the second of two layers
    for i, own in enumerate(matrices):
        if own is not None:
            down, up = own[0].to(device), own[1].t().contiguous().to(device)
            owners += [down, up]
            records[1, i] = make_record(down.data_ptr(), up.data_ptr(), ranks[i], own[2])
    on_device = torch.from_numpy(records).to(device)
    batch = sort_rows(adapters.numpy(), on_device, max(1, *ranks), owners)
    x, found = x.to(device), out.to(device)
    kernels.add_low_rank(found[:, 1:-4], x[:, 2:-1], batch, 1)
    scale = expected.abs().max().item() + 1
    torch.testing.assert_close(
        found.cpu(), expected, atol=TOLERANCES[dtype] * scale, rtol=TOLERANCES[dtype]
    )
    assert torch.equal(found[-1].cpu(), out[-1])
