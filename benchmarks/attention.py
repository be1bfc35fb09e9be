"""Times one layer's paged attention, against what moving its K/V alone would take.

    python benchmarks/attention.py [--device cpu] [--dtype bfloat16] [--fallback]

Each line: a batch, the median time of a call, the rate at which K/V bytes (each
counted once) and products pass, and the largest difference from the reference.
The layers of a cache are walked in turn, as a model does, so that K/V comes from
memory and not from a processor's cache.
"""

import argparse
import statistics
import time

import torch

from octavo.kernels import ops, reference
from octavo.kernels.cpu import fallback
from octavo.kernels.metadata import AttentionMetadata

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16  # SmolLM2-135M
NUM_LAYERS = 30

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


def make_batch(
    lengths: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Returns queries, a cache with its blocks in random order, and the metadata."""
    counts = [-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths]
    order = torch.randperm(sum(counts), dtype=torch.int32)
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    used = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[used : used + count]
        used += count
    queries = torch.tensor([0] + [query_len for query_len, _ in lengths])
    shape = (sum(counts), NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    cache = torch.randn(shape, dtype=dtype).to(device)
    query = torch.randn(int(queries.sum()), NUM_HEADS, HEAD_DIM, dtype=dtype).to(device)
    metadata = AttentionMetadata(
        query_starts=queries.cumsum(0).int().to(device),
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32).to(device),
        block_tables=tables.to(device),
        slot_mapping=torch.zeros(len(query), dtype=torch.int64, device=device),
        max_query_len=int(queries.max()),
        max_seq_len=max(seq_len for _, seq_len in lengths),
    )
    return query, cache, metadata


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fallback", action="store_true", help="the CPU path without a compiler")
    parser.add_argument("--repeat", type=int, default=10, help="walks over all layers")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    kernels = fallback if args.fallback else ops
    scale = HEAD_DIM**-0.5
    for name, lengths in BATCHES.items():
        query, cache, metadata = make_batch(lengths, dtype, device)
        layers = [(cache[:, layer, 0], cache[:, layer, 1]) for layer in range(NUM_LAYERS)]
        # What an implementation wrote itself, it can be held to the reference for.
        num_slots = cache.shape[0] * BLOCK_SIZE
        rows = torch.randn((2, num_slots, NUM_KV_HEADS, HEAD_DIM), dtype=dtype, device=device)
        kernels.write_kv(*rows, *layers[0], torch.arange(num_slots, device=device))
        plain = rows.unflatten(1, (-1, BLOCK_SIZE)).transpose(2, 3)
        times = []
        for _ in range(args.repeat):
            start = time.perf_counter()
            for keys, values in layers:
                kernels.paged_attention(query, keys, values, metadata, scale=scale)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / NUM_LAYERS)
        seconds = statistics.median(times)
        expected = reference.paged_attention(query, *plain, metadata, scale=scale)
        result = kernels.paged_attention(query, *layers[0], metadata, scale=scale)
        error = (result - expected).abs().max()
        kv_bytes = sum(seq_len for _, seq_len in lengths) * NUM_KV_HEADS * HEAD_DIM * 2
        products = sum(q * (2 * n - q + 1) / 2 for q, n in lengths) * NUM_HEADS * HEAD_DIM * 4
        print(
            f"{name:30} {seconds * 1e6:9.0f} us  "
            f"{kv_bytes * cache.element_size() / seconds / 1e9:7.1f} GB/s  "
            f"{products / seconds / 1e9:7.1f} GFLOP/s  error {error.item():.1e}"
        )


if __name__ == "__main__":
    main()
