"""An event loop that lags behind gets many steps at once."""

import asyncio
import threading
import time

import pytest

from octavo.engine.events import StepOutput
from octavo.engine.rpc.thread_bridge import thread_bridge
from octavo.v1.engine_pb2 import Load, Started

STEPS = 1000


def load(step: int) -> Load:
    return Load(running=step, waiting=0)


def started(step: int) -> dict[int, StepOutput]:
    return {0: StepOutput(started=[Started(request_id=str(step))])}


async def test_a_loop_that_is_behind_gets_all_in_one_go():
    told = []
    publish = thread_bridge(
        asyncio.get_running_loop(), lambda *published: told.append(published), pytest.fail
    )

    def step():
        for i in range(STEPS):
            publish(started(i), (), load(i))

    core = threading.Thread(target=step)
    core.start()
    core.join()  # blocks the loop
    await asyncio.sleep(0)
    assert told == [(started(i), (), load(i)) for i in range(STEPS)]
    publish({}, (), load(7))
    await asyncio.sleep(0)
    assert told[-1] == ({}, (), load(7))


async def test_nothing_is_left_behind_while_both_run():
    count = 0
    done = asyncio.Event()

    def distribute(outputs, _changes, load):
        nonlocal count
        count += len(outputs)
        if load.running == STEPS - 1:
            done.set()

    publish = thread_bridge(asyncio.get_running_loop(), distribute, pytest.fail)

    def step():
        for i in range(STEPS):
            publish(started(i), (), load(i))
            if i % 100 == 0:
                time.sleep(0.001)

    core = threading.Thread(target=step)
    core.start()
    await asyncio.wait_for(done.wait(), 20)
    core.join()
    assert count == STEPS


async def test_what_cannot_be_handed_over_is_said_and_the_next_is_handed_over():
    told = []

    def distribute(_outputs, _changes, load):
        if load.running == 0:
            raise ValueError("for a test")
        told.append(load.running)

    loop = asyncio.get_running_loop()
    publish = thread_bridge(loop, distribute, lambda: told.append("failed"))
    for step in range(2):
        publish(started(step), (), load(step))
        await asyncio.sleep(0)
    assert told == ["failed", 1]
