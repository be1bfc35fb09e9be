"""Sums tensors with the other ranks in a shared file; prints the bytes of the results.

python -m tests.kernels.summing_rank PATH RANK RANKS ROUNDS PATIENCE
"""

import hashlib
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import torch

from octavo.engine.parallel.collectives import OPERATOR
from octavo.kernels import cpu
from octavo.kernels.cpu.sums import DTYPES

SIZES = (1, 7, 576, 48 * 576, 1_000_003)


def part(rank, size, dtype):
    numbers = torch.from_numpy(np.random.default_rng(100 * rank + size).normal(size=size))
    return numbers.to(dtype)


def expected(ranks, size, dtype):
    total = part(0, size, dtype).float()
    for rank in range(1, ranks):
        total += part(rank, size, dtype).float()
    return total.to(dtype)


def main():
    path, *numbers = sys.argv[1:]
    rank, ranks, rounds, patience = map(int, numbers)
    sums = cpu.sums
    with Path(path).open("r+b") as file:
        sums.share(mmap.mmap(file.fileno(), sums.bytes(ranks)), rank, ranks, patience)
    digest = hashlib.sha256()
    for _ in range(rounds):
        for size in SIZES:
            for dtype in DTYPES:
                x, residual = part(rank, size, dtype), part(99, size, dtype)
                total, added = sums.add(x), torch.ops.octavo_cpu.sum_over_ranks(x, residual)
                assert torch.equal(total, expected(ranks, size, dtype)), (size, dtype)
                assert torch.equal(added, total + residual), (size, dtype)
                digest.update(total.view(torch.uint8).numpy().tobytes())
    print(digest.hexdigest(), OPERATOR.name(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
