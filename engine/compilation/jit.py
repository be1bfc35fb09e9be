"""The compiled step on a GPU: compiled in this process, before the engine is ready.

Inductor makes one kernel of what is between two products: a residual, a norm, a SwiGLU.
What it compiled it keeps on disk, so that the next start is quicker.
"""

import os
from collections.abc import Callable

import structlog
import torch

from octavo.common.models.cache import cache_dir
from octavo.engine.attention.operator import DryRun, attending
from octavo.engine.compilation.capture import capture, example
from octavo.engine.compilation.rotation import fuse_rotary_embeddings
from octavo.engine.models.step import EagerStep

log = structlog.get_logger(__name__)

OTHER_SIZES = (2, 2), (3, 2), (1000, 3)
"""Tokens and rows of a few decodes and of a long prompt's chunk."""


class _Watched(torch.nn.Module):
    """A step that reports each run in Python, where the compiler has not replaced it."""

    def __init__(self, step: torch.nn.Module, report: Callable[[int, int], None]) -> None:
        super().__init__()
        self._step = step
        self._report = report

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self._report(token_ids.shape[1], len(logit_rows))
        logits: torch.Tensor = self._step(token_ids, positions, logit_rows)
        return logits


class JitStep:
    """A model's step, compiled once for every number of tokens from two.

    Where it does not fit, as one token alone, the step runs uncompiled: no request ever
    waits for the compiler. Such steps are counted, and all but those of one token logged.

    Attributes:
        eager_steps: how many steps ran uncompiled.

    Args:
        step: to compile.
        device: where it is.

    Raises:
        Exception: whatever torch raises of a model that it cannot capture or compile, or
            compiles for one size alone.
    """

    def __init__(self, step: EagerStep, device: torch.device) -> None:
        self.eager_steps = 0
        self._misfits = 0
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))
        captured = capture(step, device)
        fuse_rotary_embeddings(captured.graph)
        captured.graph_module.recompile()
        self._step = torch.compile(
            _Watched(captured.module(check_guards=False), self._count), dynamic=True, fullgraph=True
        )
        with torch.inference_mode(), attending(DryRun()):
            self._step(*example(device))
            # Were it of use for that one size only, all others would run uncompiled, unnoticed.
            with torch.compiler.set_stance("fail_on_recompile"):
                for tokens, rows in OTHER_SIZES:
                    self._step(*example(device, tokens, rows))

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Runs the model within `attending`; see `octavo.engine.models.step.Step`."""
        count = len(logit_rows)
        if count == 1:
            logit_rows = logit_rows.repeat(2)
        with torch.compiler.set_stance("eager_on_recompile"):
            logits: torch.Tensor = self._step(token_ids, positions, logit_rows)
        return logits[:count]

    def _count(self, tokens: int, rows: int) -> None:
        """Count a step that ran uncompiled.

        Of those with several tokens, the first, tenth, hundredth and so on are logged.
        """
        self.eager_steps += 1
        if tokens == 1:
            return
        self._misfits += 1
        if str(self._misfits).strip("0") == "1":
            log.warning(
                "a step ran uncompiled: it does not fit what was compiled",
                tokens=tokens,
                rows=rows,
                steps=self._misfits,
            )
