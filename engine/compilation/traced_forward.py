"""A CPU's step: traced, with fused operators, and run without Python."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from octavo.engine.attention.operator import PagedStep, current_step
from octavo.engine.compilation.fusion import fuse
from octavo.engine.compilation.script import Script
from octavo.engine.compilation.trace import trace
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.linear.adapted_layers import TracedAdapters, applying
from octavo.kernels import cpu, huge_pages
from octavo.kernels.cpu.caches import CheckedCaches

NO_MASKS: Mapping[int, np.ndarray] = {}


class TracedForward:
    """A step that runs without the interpreter's lock.

    Args:
        forward: The step to trace.
        vocab_size: Number of tokens in the vocabulary.
        dtype: The type of activations.
        adapters: Whether it applies the current adapters.

    Raises:
        UntraceableError: Its calls depend on more than its number of tokens and of rows.
        UnscriptableError: It calls an operator that needs Python.
        Exception: PyTorch raises it.
    """

    def __init__(
        self, forward: EagerForward, vocab_size: int, dtype: torch.dtype, *, adapters: bool = False
    ) -> None:
        self._dtype = dtype
        self._caches: CheckedCaches | None = None
        with applying(TracedAdapters() if adapters else None):
            traced = trace(forward, vocab_size)
        fuse(traced.graph)
        self._script = Script(traced)
        huge_pages.collapse(list(traced.constants.values()))

    def __call__(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        """Run the model within `attending` and `applying`; see `octavo.engine.models.forward`."""
        within = current_step()
        kept = cpu.set_step(self._checked(within), within.groups)
        logits = self._script(token_ids, positions, logit_rows)
        del kept
        return logits

    def most_likely(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        masks: Mapping[int, np.ndarray] = NO_MASKS,
    ) -> list[int]:
        """Run the model within `attending`; return each row's most likely token.

        Args:
            token_ids: See `__call__`.
            positions: See `__call__`.
            logit_rows: See `__call__`.
            masks: Masks of the rows that have one: `[words]` int32, as for
                `octavo.kernels.logits.mask_logits`.

        Returns:
            The tokens; the first on a tie.
        """
        logits = self(token_ids, positions, logit_rows)
        if masks:
            cpu.mask_logits(logits, np.array(list(masks), np.int64), np.stack(list(masks.values())))
        tokens: list[int] = cpu.argmax(logits).tolist()
        return tokens

    def _checked(self, within: PagedStep) -> CheckedCaches:
        """Return a step's checked caches; reuse the previous step's if they are the same."""
        checked = self._caches
        if checked is None or not checked.are_of(within.layers, within.states):
            checked = self._caches = CheckedCaches(
                within.layers, within.states, self._dtype, within.kv_scales
            )
        return checked
