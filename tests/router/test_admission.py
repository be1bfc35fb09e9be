import asyncio
from dataclasses import dataclass, field

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.common import rpc
from octavo.v1 import engine_pb2
from router.admission import PRIORITY_SECONDS, Admission, CompletionRate, Ticket
from router.balancing import LeastLoaded


@dataclass(eq=False)
class Replica:
    max_num_seqs: int = 1
    sequences: int = 0
    load: engine_pb2.Load = field(default_factory=engine_pb2.Load)


def ticket(arrival: float = 0.0, *, priority: int = 0, sequences: int = 1, model: str = "m"):
    return Ticket(model, sequences, priority, arrival)


def admission(*replicas: Replica, size: int = 100) -> Admission[Replica]:
    def candidates(model):
        if not replicas or model == "down":
            raise rpc.unavailable("none is up")
        return replicas

    return Admission(candidates, size, LeastLoaded())


async def queue(gate, *tickets) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(gate.admit(t)) for t in tickets]
    await asyncio.sleep(0)
    return tasks


async def test_order_is_by_priority_and_age():
    replica = Replica(1, sequences=2)
    gate = admission(replica)
    order = []

    async def wait(name, t):
        await gate.admit(t)
        order.append(name)

    tasks = [
        asyncio.create_task(wait(name, t))
        for name, t in {
            "late": ticket(3.0),
            "early": ticket(1.0),
            "urgent": ticket(4.0, priority=1),
            "starved": ticket(4.5 - 2 * PRIORITY_SECONDS),
        }.items()
    ]
    await asyncio.sleep(0)
    assert len(gate) == 4
    for _ in tasks:
        gate.release(replica, ticket())
        await asyncio.sleep(0)
    assert order == ["starved", "urgent", "early", "late"]


async def test_wide_request_is_not_starved_by_narrow_ones():
    replica = Replica(4, sequences=5)
    gate = admission(replica)
    wide, narrow = await queue(gate, ticket(1, sequences=4), ticket(2))
    for _ in range(3):
        gate.release(replica, ticket())
        await asyncio.sleep(0)
    assert not wide.done()
    assert not narrow.done()
    gate.release(replica, ticket())
    await asyncio.sleep(0)
    assert wide.done()
    assert not narrow.done()
    narrow.cancel()
    await asyncio.gather(narrow, return_exceptions=True)


async def test_full_queue_is_refused_with_a_time():
    gate = admission(Replica(1, sequences=2), size=2)
    tasks = await queue(gate, ticket(), ticket())
    with pytest.raises(rpc.RpcError) as caught:
        await gate.admit(ticket())
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.retry_after
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(gate) == 0


async def test_none_up_is_said_at_once_and_to_those_who_wait():
    gate = admission()
    with pytest.raises(rpc.RpcError, match="none is up"):
        await gate.admit(ticket())
    replicas = [Replica(1, sequences=2)]

    def candidates(model):
        if not replicas:
            raise rpc.unavailable("none is up")
        return replicas

    gate = Admission(candidates, 10, LeastLoaded())
    tasks = await queue(gate, ticket(), ticket())
    replicas.clear()
    gate.dispatch("m")
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, rpc.RpcError) for result in results)
    assert len(gate) == 0


async def test_one_models_queue_does_not_hold_up_anothers():
    engines = {"a": [Replica(1, sequences=2)], "b": [Replica(1)]}
    gate = Admission(engines.__getitem__, 10, LeastLoaded())
    (waiting,) = await queue(gate, ticket(model="a"))
    assert await gate.admit(ticket(model="b")) is engines["b"][0]
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_cancelled_head_lets_those_behind_go():
    replica = Replica(4, sequences=3)
    gate = admission(replica)
    wide, narrow = await queue(gate, ticket(1, sequences=4), ticket(2))
    wide.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await asyncio.wait_for(narrow, 1) is replica
    assert replica.sequences == 4


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_grant_and_cancel_in_the_same_instant(cancel_first):
    replica = Replica(1, sequences=2)
    gate = admission(replica)
    first, second = await queue(gate, ticket(1), ticket(2))
    if cancel_first:
        first.cancel()
        gate.release(replica, ticket())
    else:
        gate.release(replica, ticket())
        first.cancel()
    await asyncio.sleep(0)
    assert await asyncio.wait_for(second, 1) is replica
    assert first.cancelled()
    assert replica.sequences == 2
    assert len(gate) == 0


@given(st.lists(st.tuples(st.sampled_from("aac rd"), st.integers(0, 5)), max_size=60))
def test_counts_always_agree(steps):
    """Whatever arrives, is cancelled or released: nothing is lost, nothing counted twice."""

    async def run():
        replicas = [Replica(2), Replica(1)]
        gate = admission(*replicas, size=4)
        tasks: dict[asyncio.Task, Ticket] = {}
        running: list[tuple[Replica, Ticket]] = []
        for step, number in steps:
            if step == "a":
                t = ticket(number, sequences=1 + number % 2, priority=number % 3)
                tasks[asyncio.create_task(gate.admit(t))] = t
            elif step == "c" and tasks:
                list(tasks)[number % len(tasks)].cancel()
            elif step == "r" and running:
                gate.release(*running.pop(number % len(running)))
            elif step == "d":
                gate.dispatch("m")
            else:
                await asyncio.sleep(0)
            for task in [t for t in tasks if t.done()]:
                granted = tasks.pop(task)
                if not task.cancelled() and task.exception() is None:
                    running.append((task.result(), granted))
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result, t in zip(results, tasks.values(), strict=True):
            if isinstance(result, Replica):
                running.append((result, t))
        assert sum(r.sequences for r in replicas) == sum(t.sequences for _, t in running)
        assert len(gate) == 0

    asyncio.run(run())


def test_completion_rate_is_of_late():
    now = [0.0]
    rate = CompletionRate(lambda: now[0])
    assert rate.per_second() is None
    for i in range(11):
        now[0] = i * 0.5
        rate.add()
    assert rate.per_second() == pytest.approx(2.2)
    now[0] = 1000.0
    assert rate.per_second() is None
