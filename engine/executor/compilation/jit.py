"""The compiled step on a GPU: compiled in this process, before the engine is ready.

Inductor makes one kernel of what is between two products: a residual, a norm, a SwiGLU.
What it compiled it keeps on disk, so that the next start is quicker.
"""

import os

import torch

from engine.executor.compilation.capture import capture, example
from engine.executor.compilation.rotation import fuse_rotary_embeddings
from engine.executor.paged_attention import ShapeProbe, attending
from engine.executor.step import EagerStep
from octavo.common.model_cache import cache_dir

OTHER_SIZES = (2, 2), (3, 2), (1000, 3)
"""Tokens and rows of a few decodes and of a long prompt's chunk."""


class JitStep:
    """A model's step, compiled once for every number of tokens from two.

    Where it does not fit, as one token alone, the step runs uncompiled: no request ever
    waits for the compiler.

    Args:
        step: to compile.
        device: where it is.

    Raises:
        Exception: whatever torch raises of a model that it cannot capture or compile, or
            compiles for one size alone.
    """

    def __init__(self, step: EagerStep, device: torch.device) -> None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))
        captured = capture(step, device)
        fuse_rotary_embeddings(captured.graph)
        captured.graph_module.recompile()
        self._step = torch.compile(
            captured.module(check_guards=False), dynamic=True, fullgraph=True
        )
        with torch.inference_mode(), attending(ShapeProbe({})):
            self._step(*example(device))
            # Were it of use for that one size only, all others would run uncompiled, unnoticed.
            with torch.compiler.set_stance("fail_on_recompile"):
                for tokens, rows in OTHER_SIZES:
                    self._step(*example(device, tokens, rows))

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Runs the model within `attending`; see `engine.executor.step.Step`."""
        count = len(logit_rows)
        if count == 1:
            logit_rows = logit_rows.repeat(2)
        with torch.compiler.set_stance("eager_on_recompile"):
            logits: torch.Tensor = self._step(token_ids, positions, logit_rows)
        return logits[:count]
