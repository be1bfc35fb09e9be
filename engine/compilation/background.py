"""Compiles in the background while the engine serves requests."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict

import psutil
import structlog
import torch

from octavo.common.background import start_thread
from octavo.engine.compilation import cache_cleanup
from octavo.engine.compilation.artifact import Artifact, CompiledStep
from octavo.engine.models.checks.self_check import SelfCheckError

log = structlog.get_logger(__name__)

NICENESS = 10
"""The compiler's niceness: starting and serving engines have priority."""
LOGGED_CHARACTERS = 2000
"""Characters of the compiler's error output that are logged, from its end."""


class Compiler:
    """A process that compiles an artifact, and a thread that waits for it.

    Args:
        artifact: The artifact to make.

    Attributes:
        step: The compiled step, once it is ready; may be read from any thread.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.step: CompiledStep | None = None
        self._artifact = artifact
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "octavo.common.leash"),
                "octavo.engine.compilation.export",
                *(json.dumps(asdict(artifact.recipe)), artifact.name),
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

    def _wait(self) -> None:
        began = time.monotonic()
        assert self._process.stderr is not None
        stderr = self._process.stderr.read()
        code = self._process.wait()
        if code:
            _warn(f"the compiler exited with code {code}: {stderr[-LOGGED_CHARACTERS:]}")
            return
        try:
            self.step = CompiledStep(self._artifact)
        except (OSError, ValueError, RuntimeError, AttributeError, SelfCheckError) as error:
            _warn(str(error))
            return
        log.info("model compiled", seconds=round(time.monotonic() - began, 1))
        cache_cleanup.prune()


def _warn(why: str) -> None:
    log.warning("the model stays uncompiled, which is slower", error=why)
