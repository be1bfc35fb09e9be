"""Compiles in the background while the service answers."""

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
from octavo.engine.compilation import cache_cleanup as upkeep
from octavo.engine.compilation.artifact import Artifact, CompiledStep
from octavo.engine.models.checks.self_check import SelfCheckError

log = structlog.get_logger(__name__)

NICENESS = 10
"""Of the compiler: who starts or answers meanwhile goes first."""
SHOWN = 2000
"""Characters of the compiler's last words that go to the log."""


class Compiler:
    """A process that compiles an artifact, and a thread that waits for it.

    Args:
        artifact: what to make.

    Attributes:
        step: the compiled step, once there is one; read from any thread.
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
            # What it makes is for as many threads as compute here.
            env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
            stdin=subprocess.PIPE,  # held open while this process lives; see leash
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
        """Waits until it is done, well or badly."""
        self._thread.join()

    def _wait(self) -> None:
        began = time.monotonic()
        assert self._process.stderr is not None
        words = self._process.stderr.read()
        code = self._process.wait()
        if code:
            _warn(f"the compiler ended with code {code}: {words[-SHOWN:]}")
            return
        try:
            self.step = CompiledStep(self._artifact)
        except (OSError, ValueError, RuntimeError, AttributeError, SelfCheckError) as error:
            _warn(str(error))
            return
        log.info("model compiled", seconds=round(time.monotonic() - began, 1))
        upkeep.prune()  # now that there is one more


def _warn(why: str) -> None:
    log.warning("the model stays uncompiled, and slower", error=why)
