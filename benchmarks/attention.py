"""Time one layer's paged attention against the time to move its K/V once.

    python -m benchmarks.attention [--device cpu] [--dtype bfloat16] [--cache-dtype int8]

Each line has a batch, a call's median time, and the rates of K/V bytes (each counted once) and of
products. Calls go through the cache's layers in turn, as a model does, so that K/V comes from
memory and not from a processor's cache. tests/kernels compare the results with the reference.
"""

import argparse

import torch

from benchmarks.gpu.shapes import SMOLLM2, make_batch
from benchmarks.gpu.timing import Timer

# Name -> (query length, sequence length) of each sequence.
BATCHES: dict[str, list[tuple[int, int]]] = {
    "decode, 1 x 200": [(1, 200)],
    "decode, 8 x 200": [(1, 200)] * 8,
    "decode, 48 x 200": [(1, 200)] * 48,
    "decode, 4 x 2048": [(1, 2048)] * 4,
    "decode, 1 x 4096": [(1, 4096)],
    "prefill, 1 x 64": [(64, 64)],
    "prefill, 1 x 512": [(512, 512)],
    "prefill, 512 of 1024": [(512, 1024)],
    "prefill, 512 of 2048": [(512, 2048)],
    "mixed, 47 x 200 + 256 of 512": [(1, 200)] * 47 + [(256, 512)],
}


def main() -> None:
    """Print a line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cache-dtype", choices=("float8_e4m3fn", "int8"))
    parser.add_argument("--repeat", type=int, default=10, help="walks over all layers")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    kept_as = getattr(torch, options.cache_dtype or "", None)
    timer = Timer(device, runs=options.repeat)
    for name, lengths in BATCHES.items():
        batch = make_batch(SMOLLM2, lengths, device, dtype=dtype, cache_dtype=kept_as)
        seconds = timer.time_recorded(batch.attend_all, calls=len(batch.caches))
        elements = sum(cache.shape[3] for cache in batch.caches[0]) * batch.cache_dtype.itemsize
        kv_bytes = len(batch.key) * SMOLLM2.num_kv_heads * elements
        products = sum(q * (2 * n - q + 1) / 2 for q, n in lengths)
        flops = 4 * products * SMOLLM2.num_heads * SMOLLM2.head_dim
        print(
            f"{name:30} {seconds * 1e6:9.0f} us  {kv_bytes / seconds / 1e9:7.1f} GB/s  "
            f"{flops / seconds / 1e9:7.1f} GFLOP/s"
        )


if __name__ == "__main__":
    main()
