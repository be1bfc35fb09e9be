"""The compiled steps of several ranks: each compiles its part, and all use theirs or none does.

Each rank captures its part of the model and compiles it apart from the others. Then all load theirs
and check them together.
"""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from torch import Tensor

from octavo.common.models import cache as model_cache
from octavo.common.models.errors import first_line
from octavo.common.stopping import exit_at_once
from octavo.engine.compilation.artifact import Artifact, CompiledStep
from octavo.engine.compilation.background import LOAD_ERRORS, Compiler, warn_uncompiled
from octavo.engine.models.checks.self_check import SelfCheckError
from octavo.engine.models.sharding.rank_step import RankStep
from octavo.engine.models.step import EagerStep
from octavo.engine.ranks.world import World, current_world
from octavo.kernels import cpu

if TYPE_CHECKING:
    from octavo.engine.models.load_model import LoadedModel

EXIT_CODE = 1

log = structlog.get_logger(__name__)


class RankCompiler(Compiler):
    """A process that compiles this rank's part, and a thread that waits for it and all others.

    Args:
        artifact: As for `Compiler`, like those below.
        size: Likewise.
        needed_bytes: Likewise, of all ranks of this machine.
        captured: Likewise.
        stack: Removes that directory.
        world: The ranks, all of which make one.
    """

    def __init__(
        self,
        artifact: Artifact,
        size: int,
        needed_bytes: int,
        captured: Path,
        *,
        stack: ExitStack,
        world: World,
    ) -> None:
        self._stack = stack
        self._world = world
        super().__init__(artifact, size, needed_bytes, captured)

    def _wait(self) -> None:
        with self._stack:
            made = self._succeeds()
        step = load_together(self._artifact if made else None, self._world.in_background())
        if step is None:
            if made:
                warn_uncompiled("not all ranks can run compiled")
            return
        shape = step.manifest.shape
        self._take(step, RankStep(step, self._world, shape.vocab_size))


def load_together(artifact: Artifact | None, world: World) -> CompiledStep | None:
    """Load each rank's compiled step, and check them together.

    Args:
        artifact: This rank's; None if it has none.
        world: The ranks, all of which call this.

    Returns:
        This rank's step; None on all ranks if one of them has none that can be used. What cannot
        be used is removed.
    """
    step = None
    if artifact is not None:
        try:
            step = CompiledStep(artifact, checked=False)
        except LOAD_ERRORS as error:
            remove_unusable(artifact, error)
    if not world.all_have(step) or step is None or artifact is None:
        return None
    cpu.set_sum(_sum)
    try:
        step.check(RankStep(step, world, step.manifest.shape.vocab_size, everywhere=True))
    except SelfCheckError as error:  # on all ranks, as all have the same logits
        remove_unusable(artifact, error)
        return None
    except Exception:
        log.exception("a compiled step failed while other ranks wait for its sums: the engine ends")
        model_cache.remove(artifact.name)
        exit_at_once(EXIT_CODE)
    return step


def compile_part(
    loaded: "LoadedModel", artifact: Artifact, size: int, needed_bytes: int, world: World
) -> RankCompiler | None:
    """Capture this rank's part of a model and start to compile it.

    Args:
        loaded: The part.
        artifact: As for `Compiler`, like those below.
        size: Likewise.
        needed_bytes: Likewise, of all ranks of this machine.
        world: The ranks, all of which call this.

    Returns:
        The compiler; None on all ranks if one of them cannot capture its part.
    """
    from octavo.engine.compilation.captured import capture_step  # noqa: PLC0415 - as `load`

    whole = RankStep(EagerStep(loaded.model), world, loaded.shape.vocab_size, everywhere=True)
    began = time.monotonic()
    with ExitStack() as stack:
        captured: Path | None = stack.enter_context(model_cache.scratch(artifact.name))
        assert captured is not None
        try:
            capture_step(loaded, artifact.recipe, whole).save(captured)
        except Exception as error:  # noqa: BLE001 - torch raises many types
            warn_uncompiled(first_line(error))
            captured = None
        if not world.all_have(captured) or captured is None:
            return None
        log.info("this rank's part captured", seconds=round(time.monotonic() - began, 1))
        return RankCompiler(
            artifact, size, needed_bytes, captured, stack=stack.pop_all(), world=world
        )


def _sum(x: Tensor) -> Tensor:
    world = current_world()
    assert world is not None
    return world.sum(x)


def remove_unusable(artifact: Artifact, error: Exception) -> None:
    """Remove an artifact that cannot be loaded, and log a warning."""
    log.warning(
        "the compiled step cannot be loaded: it is removed and compiled again", error=str(error)
    )
    model_cache.remove(artifact.name)
