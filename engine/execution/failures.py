"""Failures of steps, and of the engine."""

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.engine.scheduling.batch import Batch


class StepError(Exception):
    """The executor failed on a step.

    Attributes:
        batch: The step's batch.
    """

    def __init__(self, batch: Batch) -> None:
        super().__init__("step failed")
        self.batch = batch


class EngineFailedError(Exception):
    """The engine can no longer compute: its process must be restarted."""


@contextmanager
def step_errors(batch: Batch) -> Iterator[None]:
    """Raise the executor's errors as `StepError`."""
    try:
        yield
    except Exception as error:
        raise StepError(batch) from error
