"""Uniform random numbers that depend only on a seed and a position.

SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014) read at any index: it has no state, so a number is the same in any batch,
after preemption, and on another engine.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(
    seeds: NDArray[np.uint64], streams: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """Return one number from [0, 1) for each (seed, stream, position).

    Args:
        seeds: `[n]`, the requests' seeds.
        streams: `[n]`, the index of the output in its request.
        positions: `[n]`, number of tokens sampled before in that output.
    """
    with np.errstate(over="ignore"):
        keys = _mix(seeds + _GOLDEN * (streams + np.uint64(1)))
        bits = _mix(keys + _GOLDEN * (positions + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's finalizer: every input bit reaches every output bit."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
