"""A step that was translated to TorchScript, loaded.

PyTorch runs it without the interpreter's lock, like a compiled one; see `container.py`.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.jit import load, optimized_execution  # type: ignore[attr-defined]

from octavo.engine.attention.operator import PagedStep
from octavo.engine.compilation.container import LatestCaches
from octavo.engine.models.linear.adapted_layers import current_adapters
from octavo.kernels import cpu


class TranslatedModel:
    """A model as `translation.translate` saved it. Its methods are those of `Container`.

    Args:
        path: The file.
        dtype: Of the model.

    Raises:
        RuntimeError: It cannot be loaded.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._caches = LatestCaches(dtype)
        cpu.register_operators()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # as in translation.py
            self._module = load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]

    def __call__(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, within: PagedStep
    ) -> Tensor:
        """Run the model; see `Container`."""
        kept = cpu.set_step(self._caches.check(within), within.groups, current_adapters())
        # Its optimizations would compile for sizes, which change from step to step.
        with optimized_execution(False):
            logits: Tensor = self._module(token_ids, positions, logit_rows)
        del kept
        return logits

    def most_likely(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        within: PagedStep,
        masks: Mapping[int, np.ndarray],
    ) -> list[int]:
        """Run the model; return each row's most likely token that its mask allows."""
        logits = self(token_ids, positions, logit_rows, within)
        if masks:
            cpu.mask_logits(logits, np.array(list(masks), np.int64), np.stack(list(masks.values())))
        tokens: list[int] = cpu.argmax(logits).tolist()
        return tokens

    def constants(self) -> list[Tensor]:
        """Return the weights in place."""
        return list(self._module.buffers())
