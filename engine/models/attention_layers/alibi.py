"""ALiBi: logits fall linearly with the distance of a key, at a rate of each head.

Press et al., "Train Short, Test Long", ICLR 2022. The rates are computed by the model's own code;
the kernels multiply them with exact distances, in float32, where transformers may round the
products to the model's dtype.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

SLOPES = "octavo_slopes"


def slopes_of(module: Any, compute: Callable[[], Tensor]) -> Tensor:  # noqa: ANN401 - of any class
    """Return a module's slopes, `[num_heads]` float32, which are computed once.

    Args:
        module: Keeps them as a buffer.
        compute: Returns them.
    """
    if SLOPES not in module._buffers:  # noqa: SLF001 - a missing attribute would raise
        assert isinstance(module, nn.Module)
        module.register_buffer(SLOPES, compute().float().contiguous(), persistent=False)
    slopes: Tensor = getattr(module, SLOPES)
    return slopes
