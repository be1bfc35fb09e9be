"""Functions that are called in engines' processes to break them."""

import re
import time

from octavo.engine.execution.executor import Executor
from octavo.engine.rpc.session import Session


def fail_every_step() -> None:
    def fail(*_, **__):
        raise RuntimeError("a step that fails, for a test")

    Executor.launch = fail


def fail_one_step() -> None:
    launch = Executor.launch

    def fail(*_, **__):
        Executor.launch = launch
        raise RuntimeError("one step that fails, for a test")

    Executor.launch = fail


def lose_events_once() -> None:
    """Lose the ends of some outputs between the core and a session."""
    add = Session.add

    def fail(self, output, load):
        if any(event.finish_reason for event in output.outputs):
            Session.add = add
            raise ValueError("events that cannot be handed over, for a test")
        add(self, output, load)

    Session.add = fail


def take_long() -> None:
    """Make each prefill take longer than the router waits."""
    launch = Executor.launch

    def slowly(self, batch, inputs, *others):
        if batch.num_tokens > batch.num_sequences:
            time.sleep(4)
        return launch(self, batch, inputs, *others)

    Executor.launch = slowly


def hang() -> None:
    Executor.launch = lambda *_, **__: time.sleep(3600)


def hang_with_the_lock() -> None:
    """Hold Python's lock while an expression is matched."""
    Executor.launch = lambda *_, **__: re.match("(a+)+$", "a" * 64 + "b")
