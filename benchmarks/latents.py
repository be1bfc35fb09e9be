"""Time one layer's latent attention, with its products absorbed and as the kernel chooses.

    python -m benchmarks.latents [--repeat 5]

The layer is DeepSeek-V3's: 128 heads, latents of 512 elements, keys of 128 + 64, values of 128, in
bfloat16, on a CPU. Absorbed, queries and results are multiplied by PyTorch's batched products; the
kernel has these inside, and expands the latents of long chunks of prefills to keys and values where
that takes fewer products. The last column counts the products of the cheaper way, so it is the rate
at which they pass.
"""

import argparse

import torch
from torch import Tensor

from benchmarks.gpu.timing import Timer
from octavo.engine.attention.latent import AbsorbedProducts, Expansion
from octavo.kernels import cpu
from octavo.kernels.cpu.latent import PackedLatents
from octavo.kernels.metadata import AttentionMetadata

HEADS, LATENT, KEY, ROTATED, VALUE = 128, 512, 128, 64, 128
SCALE = (KEY + ROTATED) ** -0.5
BLOCK_SIZE = 16
# Name -> (query length, sequence length) of each sequence.
BATCHES: dict[str, list[tuple[int, int]]] = {
    "decode, 1 x 2048": [(1, 2048)],
    "decode, 8 x 200": [(1, 200)] * 8,
    "prefill, 1 x 64": [(64, 64)],
    "prefill, 1 x 256": [(256, 256)],
    "prefill, 1 x 1024": [(1024, 1024)],
    "prefill, 128 of 1024": [(128, 1024)],
    "prefill, 256 of 1024": [(256, 1024)],
    "prefill, 512 of 2048": [(512, 2048)],
    "mixed, 8 x 200 + 256 of 512": [(1, 200)] * 8 + [(256, 512)],
}


class Layer:
    """One layer's products, and a batch with its cache."""

    def __init__(self, lengths: list[tuple[int, int]]) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16
        expansion = Expansion("kv_b_proj", KEY, VALUE)
        weight = (torch.randn(HEADS * (KEY + VALUE), LATENT) * LATENT**-0.5).to(dtype)
        self.absorbed = AbsorbedProducts(expansion, weight)
        assert cpu.latents is not None
        keys, values = self.absorbed.keys.detach(), self.absorbed.values.detach()
        pack = cpu.latents.pack
        self.packed = PackedLatents(
            *(pack(keys.transpose(1, 2)), pack(keys), pack(values.transpose(1, 2))),
            *(VALUE, ROTATED),
        )
        counts = [-(-tokens // BLOCK_SIZE) for _, tokens in lengths]
        first = [sum(counts[:i]) for i in range(len(counts))]
        tables = [[*range(start, start + max(counts))] for start in first]
        self.cache = torch.randn(sum(counts), 1, BLOCK_SIZE, LATENT + ROTATED).to(dtype)
        queries = [count for count, _ in lengths]
        self.metadata = AttentionMetadata(
            torch.tensor([0, *queries]).cumsum(0).int(),
            torch.tensor([tokens for _, tokens in lengths]).int(),
            torch.tensor(tables).int().clamp(max=sum(counts) - 1),
            torch.zeros(sum(queries), dtype=torch.int64),
            max(queries),
            max(tokens for _, tokens in lengths),
        )
        self.query = torch.randn(HEADS, sum(queries), KEY + ROTATED).to(dtype)

    def attend_absorbed(self) -> Tensor:
        """Return the results with all products absorbed."""
        query = self.absorbed.absorb(self.query).transpose(0, 1)
        out = cpu.paged_attention(
            query, self.cache, None, self.metadata, scale=SCALE, value_dim=LATENT
        )
        return self.absorbed.expand(out.transpose(0, 1)).transpose(0, 1)

    def attend(self) -> Tensor:
        """Return the kernel's results."""
        return cpu.latent_attention(
            self.query.transpose(0, 1),
            self.cache,
            self.metadata,
            self.packed,
            scale=SCALE,
        )


def products(lengths: list[tuple[int, int]]) -> float:
    """Return the products that the cheaper way takes, each sequence by itself."""
    total = 0
    for queries, tokens in lengths:
        seen = sum(range(tokens - queries + 1, tokens + 1))
        absorbed = queries * (KEY + VALUE) * LATENT + seen * (2 * LATENT + ROTATED)
        expanded = tokens * (KEY + VALUE) * LATENT + seen * (KEY + VALUE + ROTATED)
        total += HEADS * min(absorbed, expanded)
    return total


def main() -> None:
    """Print a line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    timer = Timer(torch.device("cpu"), runs=options.repeat)
    for name, lengths in BATCHES.items():
        layer = Layer(lengths)
        absorbed = timer.time_recorded(layer.attend_absorbed)
        chosen = timer.time_recorded(layer.attend)
        rate = 2 * products(lengths) / chosen / 1e9
        print(
            f"{name:30} absorbed {absorbed * 1e3:8.2f} ms, kernel {chosen * 1e3:8.2f} ms"
            f"  {absorbed / chosen:5.2f}x  {rate:6.1f} GFLOP/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
