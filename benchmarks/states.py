"""Time layers that keep states against the least time that this CPU could take.

    python -m benchmarks.states [--repeat 5]

The sizes are those of models: Mamba-2 of Falcon-H1-1.5B and Granite-4.0-H-Tiny, gated delta rules
of Qwen3-Next-80B, Mamba of Jamba-Mini, and their convolutions; in bfloat16, with states in float32.
The floor is the greater of two times: that of the bytes, of states (read and written) and rows, at
the rate at which PyTorch adds to memory in place, and that of the multiplications and additions
that a prefill cannot do without, at the rate of PyTorch's float32 product of matrices. It counts no
exponentials. Both rates are measured first. Layers are walked in turn, so that states come from
memory, as in a model.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.timing import Timer
from octavo.kernels import states
from octavo.kernels.state_rows import StateRows

BATCHES: dict[str, list[tuple[int, int]]] = {  # (query length, sequence length) of each sequence
    "decode x 1": [(1, 500)],
    "decode x 8": [(1, 500)] * 8,
    "decode x 48": [(1, 500)] * 48,
    "prefill of 512": [(512, 512)],
}
WALKED_BYTES = 256 << 20
"""States of all layers that are walked in turn: more than a processor's cache."""
MOST_LAYERS = 24


@dataclass(frozen=True)
class Layer:
    """One layer's sizes.

    Attributes:
        operation: of `octavo.kernels.states`.
        heads: that have a state; of a convolution, 1.
        shared: groups or key heads.
        dims: of a head's state: `[head_dim, state_size]`, `[key_dim, value_dim]`, `[channels,
            state_size]`, or `[channels, width - 1]`.
        token_flops: multiplications and additions of a token of a long prefill.
    """

    operation: str
    heads: int
    shared: int
    dims: tuple[int, int]
    token_flops: int

    @property
    def itemsize(self) -> int:
        """Bytes of a state's element."""
        return 2 if self.operation == "causal_conv" else 4

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state."""
        return self.heads * math.prod(self.dims) * self.itemsize

    @property
    def token_elements(self) -> int:
        """Elements of a token's inputs and results."""
        rows, columns = self.dims
        if self.operation == "ssd":
            return 2 * self.heads * rows + 2 * self.shared * columns
        if self.operation == "gated_delta":
            return 2 * self.heads * columns + 2 * self.shared * rows
        return (2 if self.operation == "causal_conv" else 3) * rows


def _recurrent(operation: str, heads: int, shared: int, dims: tuple[int, int]) -> Layer:
    """Return a layer whose tokens read and update the state of every head by a product each."""
    return Layer(operation, heads, shared, dims, 4 * heads * math.prod(dims))


LAYERS = {
    "Mamba-2, Falcon-H1": _recurrent("ssd", 48, 1, (64, 256)),
    "Mamba-2, Granite 4": _recurrent("ssd", 48, 1, (64, 128)),
    "delta rule, Qwen3-Next": _recurrent("gated_delta", 32, 16, (128, 128)),
    "Mamba, Jamba": Layer("selective_scan", 1, 1, (8192, 16), 6 * 8192 * 16),
    "convolution, Falcon-H1": Layer("causal_conv", 1, 1, (3584, 3), 8 * 3584),
    "convolution, Qwen3-Next": Layer("causal_conv", 1, 1, (8192, 3), 8 * 8192),
}


def make_call(layer: Layer, lengths: list[tuple[int, int]], copies: int) -> Callable[[], object]:
    """Return a function that computes a batch, once with each copy of the layer's states."""
    tokens, seqs = sum(queries for queries, _ in lengths), len(lengths)
    rows, columns = layer.dims
    dtype = torch.bfloat16 if layer.operation == "causal_conv" else torch.float32
    cached = [torch.randn(seqs, layer.heads, rows, columns).to(dtype) for _ in range(copies)]
    starts = torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0).int()
    tables = torch.arange(seqs).int()[:, None]
    seq_lens = torch.tensor([length for _, length in lengths]).int()
    places = [StateRows(state, 0, tables, starts, seq_lens) for state in cached]

    def inputs(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape).bfloat16()

    heads = layer.heads
    if layer.operation == "ssd":
        x, b, c = inputs(heads, rows), *(inputs(layer.shared, columns) for _ in range(2))
        dt, a = torch.rand(tokens, heads), -torch.rand(heads)
        return lambda: [states.ssd(x, dt, a, b, c, own) for own in places]
    if layer.operation == "gated_delta":
        query, key = (inputs(layer.shared, rows) for _ in range(2))
        value, g, beta = (
            inputs(heads, columns),
            -torch.rand(tokens, heads),
            torch.rand(tokens, heads),
        )
        options = {"scale": rows**-0.5, "normalize": True}
        return lambda: [
            states.gated_delta(query, key, value, g, beta, own, **options) for own in places
        ]
    if layer.operation == "selective_scan":
        x, dt, a = inputs(rows), torch.rand(tokens, rows), -torch.rand(rows, columns)
        b, c = (inputs(columns) for _ in range(2))
        return lambda: [states.selective_scan(x, dt, a, b, c, own) for own in places]
    x, weight = inputs(rows), torch.randn(rows, columns + 1).bfloat16()
    return lambda: [states.causal_conv(x, weight, None, own, activation="silu") for own in places]


def rates(timer: Timer) -> tuple[float, float]:
    """Return the bytes a second that are read and written in place, and float32 flops a second."""
    memory = torch.zeros(64 << 20)
    seconds = timer.time_recorded(lambda: memory.add_(1))
    size = 1536
    left, right = torch.randn(size, size), torch.randn(size, size)
    return 2 * memory.nbytes / seconds, 2 * size**3 / timer.time_recorded(lambda: left @ right)


def main() -> None:
    """Print a line for each layer and batch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=5, help="walks over all copies")
    options = parser.parse_args()
    timer = Timer(torch.device("cpu"), runs=options.repeat)
    bytes_a_second, flops_a_second = rates(timer)
    print(f"memory {bytes_a_second / 1e9:.1f} GB/s, float32 {flops_a_second / 1e9:.0f} GFLOP/s")
    for name, layer in LAYERS.items():
        for batch, lengths in BATCHES.items():
            state_bytes = len(lengths) * layer.state_bytes
            copies = min(MOST_LAYERS, max(2, WALKED_BYTES // state_bytes))
            seconds = timer.time_recorded(make_call(layer, lengths, copies)) / copies
            tokens = sum(queries for queries, _ in lengths)
            moved = 2 * state_bytes + 2 * tokens * layer.token_elements
            floor = max(moved / bytes_a_second, tokens * layer.token_flops / flops_a_second)
            print(
                f"{name:24} {batch:15} {seconds * 1e6:9.0f} us, floor {floor * 1e6:9.0f}"
                f"  {seconds / floor:5.1f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
