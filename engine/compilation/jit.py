"""The compiled step on a GPU: compiled in this process, before the engine is ready.

Inductor compiles the operators between two products (a residual, a norm, a SwiGLU) to one kernel.
It caches kernels on disk, so the next start is faster.
"""

import math
import os
from collections.abc import Callable

import structlog
import torch
from torch._inductor import config as inductor

from octavo.common import resources
from octavo.common.models.cache import cache_dir
from octavo.engine.attention.operator import DryRun, attending
from octavo.engine.compilation.capture import capture, example
from octavo.engine.compilation.rotation import fuse_rotary_embeddings
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.linear.adapted_layers import current_adapters

log = structlog.get_logger(__name__)

OTHER_SIZES = (2, 2), (3, 2), (1000, 3)
"""Tokens and rows of a few decodes and of a long prompt's chunk."""


class _Reporting(torch.nn.Module):
    """A step that reports each run in Python; compiled code does not report."""

    def __init__(self, forward: torch.nn.Module, report: Callable[[int, int], None]) -> None:
        super().__init__()
        self._forward = forward
        self._report = report

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self._report(token_ids.shape[1], len(logit_rows))
        logits: torch.Tensor = self._forward(token_ids, positions, logit_rows)
        return logits


def limit_compilers() -> None:
    """Let Inductor start no more compilers than a CPU quota can run.

    It starts one for each core of the machine; with a container's quota they would throttle the
    engine. A user's own TORCHINDUCTOR_COMPILE_THREADS applies as it is.
    """
    quota, compilers = resources.cpu_quota(), inductor.compile_threads
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ and quota < (compilers or math.inf):
        inductor.compile_threads = max(1, math.floor(quota))


class JitForward:
    """A model's step, compiled once for any number of tokens from two.

    Other steps, such as of a single token, run uncompiled: no request waits for the compiler. They
    are counted, and those of several tokens are logged. Steps with adapters also run uncompiled, as
    the compiled code applies none.

    Attributes:
        eager_steps: Number of steps that ran uncompiled.

    Args:
        forward: The step to compile.
        device: The model's device.

    Raises:
        Exception: Torch cannot capture or compile the model, or compiles it for one size only.
    """

    def __init__(self, forward: EagerForward, device: torch.device) -> None:
        self.eager_steps = 0
        self._uncompiled = 0
        self._eager = forward
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))
        limit_compilers()
        captured = capture(forward, device)
        fuse_rotary_embeddings(captured.graph)
        captured.graph_module.recompile()
        self._forward = torch.compile(
            _Reporting(captured.module(check_guards=False), self._count),
            dynamic=True,
            fullgraph=True,
        )
        with torch.inference_mode(), attending(DryRun()):
            self._forward(*example(device))
            # If only this size were compiled, all others would run uncompiled.
            with torch.compiler.set_stance("fail_on_recompile"):
                for tokens, rows in OTHER_SIZES:
                    self._forward(*example(device, tokens, rows))

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Run the model within `attending`; see `octavo.engine.models.forward`."""
        if current_adapters() is not None:
            self.eager_steps += 1
            adapted: torch.Tensor = self._eager(token_ids, positions, logit_rows)
            return adapted
        count = len(logit_rows)
        if count == 1:
            logit_rows = logit_rows.repeat(2)
        with torch.compiler.set_stance("eager_on_recompile"):
            logits: torch.Tensor = self._forward(token_ids, positions, logit_rows)
        return logits[:count]

    def _count(self, tokens: int, rows: int) -> None:
        """Count a step that ran uncompiled; log the 1st, 10th, 100th... of several tokens."""
        self.eager_steps += 1
        if tokens == 1:
            return
        self._uncompiled += 1
        if str(self._uncompiled).strip("0") == "1":
            log.warning(
                "a step ran uncompiled: its size was not compiled",
                tokens=tokens,
                rows=rows,
                steps=self._uncompiled,
            )
