"""ALiBi: logits fall linearly with the distance of a key, at a rate per head.

Press et al., "Train Short, Test Long", ICLR 2022. The model's own code computes the rates; the
kernels multiply them by exact distances in float32, where transformers may round the products to
the model's dtype.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

SLOPES = "octavo_slopes"


def slopes_of(module: Any, compute: Callable[[], Tensor]) -> Tensor:  # noqa: ANN401 - of any class
    """Return a module's slopes, `[num_heads]` float32, computed once.

    Args:
        module: The module, which keeps them as a buffer.
        compute: Returns the slopes.
    """
    if SLOPES not in module._buffers:  # noqa: SLF001 - a missing attribute would raise
        assert isinstance(module, nn.Module)
        module.register_buffer(SLOPES, compute().float().contiguous(), persistent=False)
    slopes: Tensor = getattr(module, SLOPES)
    return slopes
