"""Time one layer of experts, as Octavo and as transformers compute it, beside the least time.

    python -m benchmarks.experts [--rows 1 8 48 512] [--repeat 7]

The layer is that of Qwen3-30B-A3B, with random weights in bfloat16 and in fewer bits. Each call
routes its rows anew, so that most weights come from memory; ways are timed in turns with the same
rows. The least time of a call is the longer of two: reading the weights of the experts that its
rows chose, once, at the rate at which PyTorch sums a large tensor, and multiplying at the rate of
PyTorch's fastest product of large matrices: of float32, bfloat16 and, for weights in 8 bits, bytes.
A call of few rows can be a little faster than that where the processor's last cache still holds
some experts. tests/kernels compare the results with the reference.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks.report import table
from octavo.engine.models.experts.expert_layer import ExpertLayer, recognize
from octavo.engine.models.experts.packed_experts import packed
from octavo.engine.models.quantization.calibration import ExpertInputs
from octavo.engine.models.quantization.experts import experts_to_int4, experts_to_int8

HIDDEN, INNER, EXPERTS, CHOSEN = 2048, 768, 128, 8
CALIBRATION_ROWS = 128
PEERS = ("grouped_mm", "eager")
BYTES = {"bfloat16": 2.0, "int8": 1.0, "int4": 20 / 32}
"""Of a weight; in 4 bits with its group's scale and zero."""
MATRIX = 2048
READ_BYTES = 512 << 20

Route = tuple[Tensor, Tensor, Tensor]
"""Rows, the experts of each, and their weights."""
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Print a line for each number of rows and each way to compute them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 48, 512])
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    layer = _make_layer()
    machine = Machine.measure(options.repeat)
    print(machine)
    ways: dict[str, Experts] = {
        **{f"transformers, {name}": _transformers(layer.module, name) for name in PEERS},
        "octavo, bfloat16": packed(layer),
        "octavo, int8": experts_to_int8(layer, _inputs()),
        "octavo, int4": experts_to_int4(layer),
    }
    for rows in options.rows:
        routes = [_route(rows) for _ in range(options.repeat)]
        active = statistics.median(count_active(route) for route in routes)
        print(f"\n{rows} rows, {active:.0f} of {EXPERTS} experts\n")
        print(table(HEADER, [*_lines(_time(ways, routes), rows, active, machine)]))


HEADER = ["Way", "ms", "Least ms", "of reading", "of products", "Least / time"]


def _lines(
    times: dict[str, float], rows: int, active: float, machine: "Machine"
) -> Iterator[list[str]]:
    for name, seconds in times.items():
        read, multiplied = machine.least(name.rpartition(" ")[2], rows, active)
        least = max(read, multiplied)
        milliseconds = (f"{time * 1e3:.2f}" for time in (seconds, least, read, multiplied))
        yield [name, *milliseconds, f"{least / seconds:.0%}"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine does at most.

    Attributes:
        read: bytes a second.
        products: multiplications and additions a second, by the type of the weights.
    """

    read: float
    products: dict[str, float]

    @classmethod
    def measure(cls, repeat: int) -> Self:
        """Return the best of some tries."""
        memory = torch.ones(READ_BYTES // 4)
        floats = torch.randn(MATRIX, MATRIX)
        halves, whole = floats.bfloat16(), torch.randint(-127, 128, floats.shape, dtype=torch.int8)
        in_floats, in_halves, in_bytes = (
            2 * MATRIX**3 / _best(multiply, matrix, matrix, repeat=repeat)
            for multiply, matrix in (
                *((torch.mm, floats), (torch.mm, halves)),
                (torch._int_mm, whole),  # noqa: SLF001 - has no public name
            )
        )
        in_floats = max(in_floats, in_halves)
        products = {"bfloat16": in_floats, "int8": max(in_floats, in_bytes), "int4": in_floats}
        return cls(READ_BYTES / _best(torch.sum, memory, repeat=repeat), products)

    def least(self, weights: str, rows: int, active: float) -> tuple[float, float]:
        """Return the least seconds that reading and multiplying take.

        Args:
            weights: their type; another one than `BYTES` has is bfloat16.
            rows: of the call.
            active: number of experts with rows.
        """
        kind = weights if weights in BYTES else "bfloat16"
        read = active * 3 * HIDDEN * INNER * BYTES[kind] / self.read
        return read, rows * CHOSEN * 6 * HIDDEN * INNER / self.products[kind]

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in self.products.items())
        return f"Memory is read at {self.read / 1e9:.1f} GB/s; GFLOP/s of products: {rates}."


def _make_layer() -> ExpertLayer:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, dtype=torch.bfloat16
    )
    with torch.device("meta"):
        module = Qwen3MoeExperts(config).bfloat16()
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        for weights in parameter:
            weights.copy_(torch.randn(weights.shape) * weights.shape[-1] ** -0.5)
    activation = recognize(module)
    assert activation is not None
    return ExpertLayer("", module, activation)


def _inputs() -> ExpertInputs:
    return ExpertInputs(*_route(CALIBRATION_ROWS)[:2])


def _route(rows: int) -> Route:
    weights, ids = torch.rand(rows, EXPERTS).softmax(-1).topk(CHOSEN)
    return torch.randn(rows, HIDDEN).bfloat16(), ids, weights


def count_active(route: Route) -> int:
    """Return the number of experts that have rows."""
    return len(route[1].unique())


def _transformers(module: nn.Module, name: str) -> Experts:
    def run(*given: Tensor) -> Tensor:
        module.config._experts_implementation = name  # noqa: SLF001 - has no public name
        out: Tensor = module(*given)
        return out

    return run


@torch.inference_mode()
def _time(ways: dict[str, Experts], routes: list[Route]) -> dict[str, float]:
    """Return the median of a call's seconds by each way."""
    for work in ways.values():
        work(*routes[0])
    taken = [{name: _seconds(work, *route) for name, work in ways.items()} for route in routes]
    return {name: statistics.median(one[name] for one in taken) for name in ways}


def _seconds(work: Callable[..., object], *given: object) -> float:
    began = time.perf_counter()
    work(*given)
    return time.perf_counter() - began


def _best(work: Callable[..., object], *given: object, repeat: int) -> float:
    work(*given)
    return min(_seconds(work, *given) for _ in range(repeat))


if __name__ == "__main__":
    main()
