"""Time one layer of experts, as Octavo and as transformers compute it, beside the least time.

    python -m benchmarks.experts [--rows 1 8 48 512] [--repeat 7]

The layer is that of Qwen3-30B-A3B, with random weights in bfloat16 and in fewer bits. The least
time is what the weights of the active experts take at the rate at which this machine copies memory,
or the products at the rate at which PyTorch multiplies large float32 matrices, whichever is longer;
where the CPU multiplies bfloat16 or bytes faster, the latter is no bound. Each call routes its rows
anew, so that weights come from memory. tests/kernels compare the results with the reference.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from octavo.engine.models.experts.expert_layer import ExpertLayer, recognize
from octavo.engine.models.experts.packed_experts import PackedExperts, packed
from octavo.engine.models.quantization.calibration import ExpertInputs
from octavo.engine.models.quantization.experts import experts_to_int4, experts_to_int8

HIDDEN, INNER, EXPERTS, CHOSEN = 2048, 768, 128, 8
CALIBRATION_ROWS = 128
BYTES = {"bfloat16": 2.0, "int8": 1.0, "int4": 20 / 32}
"""Of a weight; in 4 bits with its group's scale and zero."""
MATRIX = 2048
COPIED = 256 << 20

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Print a line for each number of rows and each way to compute them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 48, 512])
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    layer = _make_layer()
    copied, products = _copy_rate(options.repeat), _product_rate(options.repeat)
    print(
        f"memory is copied at {copied / 1e9:.1f} GB/s, products run at {products / 1e9:.0f} GFLOP/s"
    )
    ways = {
        "bfloat16": packed(layer),
        "int8": experts_to_int8(layer, _inputs()),
        "int4": experts_to_int4(layer),
    }
    for rows in options.rows:
        active = _active(rows)
        for name in ("grouped_mm", "eager"):
            seconds = _time(_transformers(layer.module, name), rows, options.repeat)
            print(f"{rows:4} rows  transformers, {name:10}  {seconds * 1e3:9.2f} ms")
        for name, way in ways.items():
            seconds = _time(way, rows, options.repeat)
            weights = active * 3 * HIDDEN * INNER
            read = weights * BYTES[name] / copied
            multiplied = rows * CHOSEN * 6 * HIDDEN * INNER / products
            print(
                f"{rows:4} rows  octavo, {name:16}  {seconds * 1e3:9.2f} ms, {active:5.1f} experts:"
                f" reading {read * 1e3:.2f} ms, products {multiplied * 1e3:.2f} ms"
            )


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


def _route(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, the experts of each and their weights."""
    weights, ids = torch.rand(rows, EXPERTS).softmax(-1).topk(CHOSEN)
    return torch.randn(rows, HIDDEN).bfloat16(), ids, weights


def _active(rows: int) -> float:
    """Return the mean number of experts with rows."""
    return EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** rows)


def _transformers(module: nn.Module, name: str) -> Experts:
    def run(*given: Tensor) -> Tensor:
        module.config._experts_implementation = name  # noqa: SLF001 - has no public name
        out: Tensor = module(*given)
        return out

    return run


@torch.inference_mode()
def _time(work: Experts | PackedExperts, rows: int, repeat: int) -> float:
    """Return the median of a call's seconds."""
    work(*_route(rows))
    return statistics.median(_seconds(work, *_route(rows)) for _ in range(repeat))


def _seconds(work: Callable[..., object], *given: object) -> float:
    began = time.perf_counter()
    work(*given)
    return time.perf_counter() - began


def _copy_rate(repeat: int) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source, to = torch.zeros(COPIED, dtype=torch.uint8), torch.zeros(COPIED, dtype=torch.uint8)
    return 2 * COPIED / min(_seconds(to.copy_, source) for _ in range(repeat))


def _product_rate(repeat: int) -> float:
    """Return the operations per second of a large product in float32."""
    a, b = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
    return 2 * MATRIX**3 / min(_seconds(torch.mm, a, b) for _ in range(repeat))


if __name__ == "__main__":
    main()
