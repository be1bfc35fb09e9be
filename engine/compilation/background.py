"""Compiles in the background while the engine serves requests."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import structlog
import torch

from octavo.common.background import start_thread
from octavo.common.child_end import why_it_ended
from octavo.common.resources import oom_kills
from octavo.engine.compilation import cache_cleanup
from octavo.engine.compilation.artifact import Artifact, CompiledStep
from octavo.engine.compilation.cpp_compiler import has_compiler
from octavo.engine.memory.cache_tensors import GIB
from octavo.engine.models.checks.self_check import SelfCheckError
from octavo.engine.models.step import Step

log = structlog.get_logger(__name__)

MODULE = "octavo.engine.compilation.export"
"""What the process runs."""
LOAD_ERRORS = (OSError, ValueError, RuntimeError, AttributeError, SelfCheckError)
"""What `CompiledStep` raises for an artifact that cannot be used."""
NICENESS = 10
"""The compiler's niceness: starting and serving engines have priority."""
LOGGED_CHARACTERS = 2000
"""Characters of the compiler's error output that are logged, from its end."""

BASE_SECONDS, SECONDS_PER_GIB = 60.0, 120.0
"""Estimate of the compiler's time on two idle cores, by the weights' size. Busy cores take longer:
the compiler's priority is low."""
TRANSLATION_SHARE = 0.5
"""Estimate of the time to translate a model, as a share of the time to compile it."""
COMPILES = "compiling the model for this CPU, once; answers are slower until it ends"
TRANSLATES = (
    "there is no C++ compiler: translating the model instead, once; answers are slower until it"
    " ends"
)
OUT_OF_MEMORY = (
    "lower --cache-memory and --swap-space, give the container more memory, or set --compile off"
)


def estimate_seconds(size: int) -> float:
    """Return the estimated time to compile a model with `size` bytes of weights."""
    return BASE_SECONDS + SECONDS_PER_GIB * size / GIB


def in_words(seconds: float) -> str:
    """Return an estimate as whole minutes."""
    minutes = max(1, round(seconds / 60))
    return f"{minutes} minute{'s' if minutes > 1 else ''}, longer if the CPU is busy"


@dataclass(frozen=True, slots=True)
class CompileProgress:
    """How far a compilation is.

    Attributes:
        seconds: How long it has run.
        estimate: How long it is estimated to take in all, in seconds.
    """

    seconds: float
    estimate: float


class Compiler:
    """A process that compiles an artifact, and a thread that waits for it.

    Args:
        artifact: The artifact to make.
        size: The bytes of the model's weights.
        needed_bytes: The memory that the process is going to take at its peak.
        captured: The directory of a saved `CapturedStep`. Default: the process loads the model.

    Attributes:
        step: The compiled step, once it is ready; may be read from any thread.
        needed_bytes: As given.
    """

    def __init__(
        self, artifact: Artifact, size: int, needed_bytes: int, captured: Path | None = None
    ) -> None:
        self.step: Step | None = None
        self.needed_bytes = needed_bytes
        self._artifact = artifact
        self._began = time.monotonic()
        compiles = has_compiler()
        self._estimate = estimate_seconds(size) * (1 if compiles else TRANSLATION_SHARE)
        self._oom_kills = oom_kills()
        log.info(
            COMPILES if compiles else TRANSLATES,
            about=in_words(self._estimate),
            gib_of_memory=round(needed_bytes / GIB, 1),
        )
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "octavo.common.leash"),
                MODULE,
                *(json.dumps(asdict(artifact.recipe)), artifact.name),
                *([] if captured is None else [str(captured)]),
            ],
            # It compiles for the number of threads of this process.
            env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
            stdin=subprocess.PIPE,  # open while this process lives; see leash.py
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        with suppress(psutil.Error):  # it may have failed already
            psutil.Process(self._process.pid).nice(NICENESS)
        self._thread = start_thread(self._wait, "compile")

    def join(self) -> None:
        """Wait until the compiler has succeeded or failed."""
        self._thread.join()

    @property
    def progress(self) -> CompileProgress | None:
        """The progress; None once it has ended."""
        if not self._thread.is_alive():
            return None
        return CompileProgress(time.monotonic() - self._began, self._estimate)

    def _wait(self) -> None:
        """Load what the process has made, or log a warning."""
        if not self._succeeds():
            return
        try:
            self._take(CompiledStep(self._artifact))
        except LOAD_ERRORS as error:
            warn_uncompiled(str(error))

    def _succeeds(self) -> bool:
        """Wait for the process, and return whether it has made the artifact; else log a warning."""
        assert self._process.stderr is not None
        stderr = self._process.stderr.read()
        code = self._process.wait()
        if code:
            why = why_it_ended(code, self._oom_kills, OUT_OF_MEMORY)
            warn_uncompiled(f"the compiler ended early ({why}): {stderr[-LOGGED_CHARACTERS:]}")
        return not code

    def _take(self, made: CompiledStep, step: Step | None = None) -> None:
        """Have a loaded step used from now on.

        Args:
            made: What was compiled.
            step: What runs it. Default: itself.
        """
        event = "model translated" if made.manifest.translated else "model compiled"
        log.info(event, seconds=round(time.monotonic() - self._began, 1))
        self.step = made if step is None else step
        cache_cleanup.prune()


def warn_uncompiled(why: str) -> None:
    """Log a warning that the compiled step cannot be used."""
    log.warning("the model stays uncompiled, which is slower", error=why)
