"""A lower bound of a GPU's time for requests: a roofline of the whole service.

Every step reads the weights, and the keys and values of every decoding sequence; every token takes
two operations per weight. Memory for keys and values limits the sequences of a step. Nothing else
counts: neither attention's arithmetic, nor operations between products, nor launches or waits.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.shapes import Layout

BYTES = 2
"""Bytes of a weight, and of an element of K or V, in bfloat16."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """A device's measured peak rates, and its memory.

    Attributes:
        bandwidth: Speed of a copy: bytes read and written per second.
        rate: Speed of a bfloat16 matrix product: operations per second.
        memory: Bytes of its memory.
    """

    bandwidth: float
    rate: float
    memory: int


def floor_seconds(
    layout: Layout,
    prompts: npt.NDArray[np.int64],
    outputs: npt.NDArray[np.int64],
    *,
    n: int,
    ceilings: Ceilings,
) -> float:
    """Return a lower bound of the seconds for requests.

    Args:
        layout: The model's sizes.
        prompts: `[requests]`; tokens of each prompt, computed once for all its outputs.
        outputs: `[requests]`; tokens of each output.
        n: Outputs of a request.
        ceilings: The device's rates and memory.
    """
    decoded = n * int(outputs.sum())
    weights = layout.layer_weights + layout.head_weights
    of_prompts, of_outputs = (outputs * prompts).sum(), n * (outputs * (outputs - 1) // 2).sum()
    kv_bytes = layout.kv_elements * BYTES  # per token
    # Token counts over all steps: keys and values in memory, and those that are read.
    held, seen = float(of_prompts + of_outputs), float(n * of_prompts + of_outputs)
    steps = held * kv_bytes / (ceilings.memory - weights * BYTES)
    reading = steps * weights * BYTES / ceilings.bandwidth
    computing = 2.0 * decoded * weights / ceilings.rate
    prefill = 2.0 * int(prompts.sum()) * layout.layer_weights / ceilings.rate
    return prefill + max(reading, computing) + seen * kv_bytes / ceilings.bandwidth
