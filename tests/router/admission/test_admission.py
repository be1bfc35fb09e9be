import asyncio

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.common import rpc
from octavo.common.priority import PRIORITY_SECONDS
from octavo.router.admission import QueueLimits
from octavo.router.tenants.tenant import Tenant
from octavo.v1 import engine_pb2
from tests.router.admission.fixture import (
    BLOCK,
    BLOCKS,
    ManualAdmission,
    Replica,
    ScriptedState,
    request,
    settle,
)


async def queue(admission, *states) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(admission.admit(state)) for state in states]
    await settle()
    return tasks


async def error_of(task) -> rpc.RpcError:
    with pytest.raises(rpc.RpcError) as caught:
        await asyncio.wait_for(task, 5)
    return caught.value


async def cancel(*tasks) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_order_is_by_priority_and_age():
    replica = Replica(1)
    admission = ManualAdmission(replica)
    claims = admission.fill(replica)
    order = []

    async def wait(name, t):
        claims.append(await admission.admit(t))
        order.append(name)

    tasks = [
        asyncio.create_task(wait(name, t))
        for name, t in {
            "late": request(3.0),
            "early": request(1.0),
            "urgent": request(4.0, priority=1),
            "starved": request(4.5 - 2 * PRIORITY_SECONDS),
        }.items()
    ]
    await settle()
    assert len(admission) == 4
    for _ in tasks:
        admission.release(claims.pop(0))
        await settle()
    assert order == ["starved", "urgent", "early", "late"]


async def test_a_wide_request_is_not_starved_by_narrow_ones():
    replica = Replica(4)
    admission = ManualAdmission(replica)
    claims = admission.fill(replica)
    wide, narrow = await queue(admission, request(1, sequences=4), request(2))
    for claim in claims[:3]:
        admission.release(claim)
        await settle()
    assert not wide.done()
    assert not narrow.done()
    admission.release(claims[3])
    await settle()
    assert wide.done()
    assert not narrow.done()
    await cancel(narrow)


async def test_memory_is_a_limit_of_its_own():
    replica = Replica(100)
    replica.load.free_blocks = 10
    admission = ManualAdmission(replica)
    half = {"prompt_tokens": 4 * BLOCK, "min_tokens": BLOCK, "max_tokens": BLOCK}
    first, second, third = await queue(admission, *(request(i, **half) for i in range(3)))
    assert first.done()
    assert second.done()
    assert not third.done(), "the blocks of the first two are spoken for"
    replica.load = engine_pb2.Load(total_blocks=BLOCKS, free_blocks=5)
    admission.dispatch("m")
    await settle()
    assert not third.done(), "a report of less changes nothing"
    replica.load = engine_pb2.Load(total_blocks=BLOCKS, free_blocks=5, cached_blocks=10)
    admission.dispatch("m")
    assert await asyncio.wait_for(third, 1)


async def test_an_empty_engine_takes_whatever_there_is():
    replica = Replica(8)
    replica.load.free_blocks = 0
    admission = ManualAdmission(replica)
    assert (await admission.admit(request(prompt_tokens=1000, max_tokens=9999))).engine is replica


async def test_a_full_queue_is_refused_with_a_time():
    replica = Replica(1)
    admission = ManualAdmission(replica, limits=QueueLimits(2, 1 << 20, 600.0))
    admission.fill(replica)
    tasks = await queue(admission, request(), request())
    error = await error_of(admission.admit(request()))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.retry_after
    await cancel(*tasks)
    assert len(admission) == 0


async def test_a_queue_is_full_of_tokens_too():
    replica = Replica(1)
    admission = ManualAdmission(replica, limits=QueueLimits(100, 1000, 600.0))
    admission.fill(replica)
    lengths = {"min_tokens": 100, "max_tokens": 100}
    tasks = await queue(admission, request(prompt_tokens=700, **lengths))
    assert admission.tokens == 800
    error = await error_of(admission.admit(request(prompt_tokens=101, **lengths)))
    assert "1000 tokens" in error.message
    tasks += await queue(admission, request(prompt_tokens=100, **lengths))
    assert len(admission) == 2
    await cancel(*tasks)


async def test_a_tenant_that_floods_a_full_queue_makes_room_for_others():
    replica = Replica(1)
    admission = ManualAdmission(replica, limits=QueueLimits(4, 1 << 20, 600.0))
    admission.fill(replica)
    flood = await queue(admission, *(request(i, tenant=Tenant("flood")) for i in range(4)))
    (modest,) = await queue(admission, request(5, tenant=Tenant("modest")))
    assert (await error_of(flood[3])).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not any(task.done() for task in (*flood[:3], modest))
    (second,) = await queue(admission, request(6, tenant=Tenant("modest")))
    (third,) = await queue(admission, request(7, tenant=Tenant("modest")))
    assert (await error_of(third)).code is grpc.StatusCode.RESOURCE_EXHAUSTED, "it has its half"
    await cancel(*flood, modest, second)


async def test_the_queue_time_is_limited():
    replica = Replica(1)
    admission = ManualAdmission(replica, limits=QueueLimits(10, 1 << 20, 0.02))
    (claim, _) = admission.fill(replica)
    (waiting,) = await queue(admission, request())
    admission.now += 0.02
    error = await error_of(waiting)
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "0.02 s" in error.message
    (migrated,) = await queue(admission, request(migrated=True))
    await asyncio.sleep(0.05)
    admission.release(claim)
    assert (await migrated).engine is replica


# Deadlines.


def learn(
    admission, replica, *, first: float, token: float, tokens: int = 11, times: int = 20
) -> None:
    """End requests that took a given time."""
    for _ in range(times):
        state = request(max_tokens=tokens)
        claim = admission.grant(state, replica)
        state.output_tokens = tokens
        state.lengths = [tokens]
        state.first_time = admission.now + first
        state.last_time = admission.now + first + token * (tokens - 1)
        admission.release(claim)


async def test_a_deadline_refuses_nothing_without_measurements():
    admission = ManualAdmission(Replica(1))
    assert await admission.admit(request(deadline=1e-6, max_tokens=10**6))


async def test_a_request_longer_than_its_deadline_is_refused_at_once():
    replica = Replica(1)
    admission = ManualAdmission(replica)
    learn(admission, replica, first=1.0, token=0.1)
    error = await error_of(admission.admit(request(deadline=1.5, max_tokens=11)))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "about 2 s" in error.message
    assert error.retry_after
    assert await admission.admit(request(deadline=2.5, max_tokens=11))


async def test_old_measurements_refuse_nothing():
    replica = Replica(1)
    admission = ManualAdmission(replica)
    learn(admission, replica, first=1.0, token=0.1)
    admission.now = 1000.0
    assert await admission.admit(request(deadline=1000.5, max_tokens=11))


async def test_a_wait_longer_than_the_deadline_is_refused_by_the_measured_rate():
    replica = Replica(1)
    admission = ManualAdmission(replica)
    claims = admission.fill(replica)
    size = {"prompt_tokens": 50, "min_tokens": 50, "max_tokens": 50}
    tasks = await queue(admission, *(request(i, **size) for i in range(40)))
    for task in tasks[:20]:  # 100 tokens a second
        admission.now += 1.0
        admission.release(claims.pop(0))
        claims.append(await task)
    error = await error_of(admission.admit(request(99, deadline=admission.now + 10.0, **size)))
    assert "start in about 26.2 s" in error.message, "21 s, and a quarter to be sure"
    (patient,) = await queue(admission, request(99, deadline=admission.now + 30.0, **size))
    assert not patient.done()
    await cancel(*tasks[20:], patient)


async def test_a_request_that_can_meet_its_deadline_again_stays_queued():
    replica = Replica(1)
    admission = ManualAdmission(replica)
    learn(admission, replica, first=0.5, token=0.05)
    (claim, _) = admission.fill(replica)
    (waiting,) = await queue(admission, request(deadline=1.02, max_tokens=11))
    learn(admission, replica, first=0.1, token=0.01, times=100)
    admission.now = 0.1
    await asyncio.sleep(0.05)
    admission.release(claim)
    assert await asyncio.wait_for(waiting, 1)


async def test_a_request_that_cannot_meet_its_deadline_leaves_the_queue():
    replica = Replica(1)
    admission = ManualAdmission(replica)
    learn(admission, replica, first=0.5, token=0.05)
    admission.fill(replica)
    (hopeful, patient) = await queue(
        admission, *(request(deadline=t, max_tokens=11) for t in (1.05, 9))
    )
    assert not hopeful.done()
    admission.now = 0.1
    error = await error_of(hopeful)
    assert "cannot be met" in error.message
    assert not patient.done()
    await cancel(patient)


# Engines that are up or down.


async def test_requests_wait_in_an_outage_and_are_then_refused():
    admission = ManualAdmission(Replica(1), outage=0.05)
    admission.down = True
    tasks = await queue(admission, request(), request(migrated=True))
    assert len(admission) == 2
    for task in tasks:
        assert (await error_of(task)).message == "none is up"
    at_once = asyncio.create_task(admission.admit(request()))
    await settle()
    assert (await error_of(at_once)).code is grpc.StatusCode.UNAVAILABLE
    admission.down = False
    admission.dispatch("m")
    assert await admission.admit(request())
    admission.down = True
    admission.dispatch("m")
    (waiting,) = await queue(admission, request())
    assert not waiting.done(), "the next outage is another"
    admission.down = False
    admission.dispatch("m")
    assert await asyncio.wait_for(waiting, 1)


async def test_the_queue_is_limited_in_an_outage():
    admission = ManualAdmission(Replica(1), limits=QueueLimits(1, 1 << 20, 600.0))
    admission.down = True
    tasks = await queue(admission, request(), request(migrated=True))
    error = await error_of(admission.admit(request()))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await cancel(*tasks)


async def test_one_models_queue_does_not_hold_up_anothers():
    busy, idle = Replica(1), Replica(2)
    admission = ManualAdmission(busy, idle)
    admission.fill(busy)
    (waiting,) = await queue(admission, request(model="1"))
    assert (await admission.admit(request(model="2"))).engine is idle
    assert not waiting.done()
    await cancel(waiting)


# Ends.


async def test_a_cancelled_head_lets_those_behind_go():
    replica = Replica(4)
    admission = ManualAdmission(replica)
    admission.fill(replica, 3)
    wide, narrow = await queue(admission, request(1, sequences=4), request(2))
    wide.cancel()
    assert (await asyncio.wait_for(narrow, 1)).engine is replica
    assert replica.sequences == 4


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_claim_and_cancel_in_the_same_instant(cancel_first):
    replica = Replica(1)
    admission = ManualAdmission(replica)
    claims = admission.fill(replica)
    first, second = await queue(admission, request(1), request(2))
    if cancel_first:
        first.cancel()
        admission.release(claims[0])
    else:
        admission.release(claims[0])
        first.cancel()
    assert (await asyncio.wait_for(second, 1)).engine is replica
    assert first.cancelled()
    assert replica.sequences == 2
    assert len(admission) == 0


LIMITS = QueueLimits(requests=5, tokens=60, seconds=600.0)
EVENTS = st.tuples(st.sampled_from("aaaccrrrludt "), st.integers(0, 11))


@given(st.lists(EVENTS, max_size=80))
def test_every_request_ends_in_exactly_one_way(steps):
    """When requests arrive, end, are cancelled or fail, nothing is lost or counted twice.

    No request waits while there is room, and the queue never exceeds its limit.
    """

    async def run():
        replicas = [Replica(2), Replica(1)]
        for replica in replicas:
            replica.load.free_blocks = 8
        admission = ManualAdmission(*replicas, limits=LIMITS)
        tasks: dict[asyncio.Task, ScriptedState] = {}
        running = []
        ends = {"admitted": 0, "refused": 0, "cancelled": 0}
        arrived = 0

        def sort_out():
            for task in [t for t in tasks if t.done()]:
                del tasks[task]
                if task.cancelled():
                    ends["cancelled"] += 1
                elif task.exception() is not None:
                    assert isinstance(task.exception(), rpc.RpcError)
                    ends["refused"] += 1
                else:
                    ends["admitted"] += 1
                    running.append(task.result())

        for step, number in steps:
            admission.now += 0.1
            if step == "a":
                arrived += 1
                t = request(
                    admission.now,
                    sequences=1 + number % 2,
                    priority=number % 3,
                    prompt_tokens=1 + number,
                    min_tokens=3,
                    max_tokens=3 + number // 2,
                    migrated=number == 11,
                    tenant=Tenant(str(number % 3), 1.0 + number % 2),
                )
                tasks[asyncio.create_task(admission.admit(t))] = t
            elif step == "c" and tasks:
                list(tasks)[number % len(tasks)].cancel()
            elif step == "r" and running:
                claim = running.pop(number % len(running))
                claim.state.output_tokens += number
                admission.release(claim)
            elif step == "l":
                replicas[number % 2].load.free_blocks = number
                admission.dispatch("m")
            elif step == "d":
                admission.down = True
                admission.dispatch("m")
            elif step == "u":
                admission.down = False
                admission.dispatch("m")
            elif step == "t" and running:
                running[number % len(running)].state.output_tokens += number
            else:
                await settle()
                sort_out()
                bounded = [c for c in admission._queues["m"].waiters if not c.migrated]
                assert len(bounded) <= LIMITS.requests
                assert sum(c.tokens for c in bounded) <= LIMITS.tokens
                # No room stays unused while a waiting request fits.
                if not admission.down and any(not replica.sequences for replica in replicas):
                    assert not tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        sort_out()
        assert sum(ends.values()) == arrived
        assert sum(r.sequences for r in replicas) == sum(claim.sequences for claim in running)
        for claim in running:
            admission.release(claim)
        assert all(r.sequences == 0 for r in replicas)
        assert (len(admission), admission.tokens) == (0, 0)
        assert not admission._queues["m"].running

    asyncio.run(run())
