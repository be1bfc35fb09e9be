"""Compiles in the background while the service answers."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import Literal

import structlog

from engine.executor.compilation.artifact import Artifact, CompiledStep

log = structlog.get_logger(__name__)

State = Literal["compiling", "ready", "failed"]
SHOWN = 2000
"""Characters of the compiler's last words that go to the log."""


class Compiler:
    """A process that compiles an artifact, and a thread that waits for it.

    Args:
        artifact: what to make.

    Attributes:
        state: of the work.
        step: the compiled step, once ready; read from any thread.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.state: State = "compiling"
        self.step: CompiledStep | None = None
        self._artifact = artifact
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "engine.executor.compilation.export"),
                *(json.dumps(asdict(artifact.recipe)), str(artifact.path)),
            ],
            stdin=subprocess.PIPE,  # held open while this process lives; see export
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._thread = threading.Thread(target=self._wait, name="compile", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until it is done, well or badly."""
        self._thread.join()

    def stop(self) -> None:
        """Gives up."""
        self._process.kill()

    def _wait(self) -> None:
        began = time.monotonic()
        assert self._process.stderr is not None
        words = self._process.stderr.read()
        code = self._process.wait()
        if code:
            self._fail(f"the compiler ended with code {code}: {words[-SHOWN:]}")
            return
        try:
            self.step = CompiledStep(self._artifact)
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(str(error))
            return
        self.state = "ready"
        log.info("model compiled", seconds=round(time.monotonic() - began, 1))

    def _fail(self, why: str) -> None:
        self.state = "failed"
        log.warning("the model stays uncompiled, and slower", error=why)
