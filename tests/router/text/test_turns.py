"""Tenants take turns with the tokenizer."""

import asyncio
from random import Random

import grpc
import pytest

from octavo.common.rpc import RpcError
from octavo.router.tenants.tenant import Tenant
from octavo.router.text.turns import Turns

ALICE, BOB = Tenant(name="alice"), Tenant(name="bob")
LONG = 100


class Workshop:
    """Start work, and record the order of turns."""

    def __init__(self, places: int = 2, max_waiting: int = 1000):
        self.turns = Turns(places, LONG, max_waiting)
        self.begun = []
        self.tasks = []

    async def ask(self, tenant: Tenant, *sizes: int) -> None:
        for size in sizes:
            self.start(tenant, size)
        await self.settle()

    def start(self, tenant: Tenant, size: int) -> None:
        task = asyncio.create_task(self._work(tenant, size))
        task.add_done_callback(retrieve)
        self.tasks.append(task)

    async def _work(self, tenant: Tenant, size: int) -> None:
        ended = asyncio.Event()

        async def work() -> None:
            self.begun.append((tenant, size, ended))
            await ended.wait()

        await self.turns.run(tenant, size, work, "work")

    async def end(self, *, long: bool = False) -> None:
        """End the oldest piece of work."""
        work = next(work for work in self.begun if (work[1] > LONG) == long)
        self.begun.remove(work)
        work[2].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def names(self) -> str:
        return "".join(tenant.name[0] for tenant, _, _ in self.begun)


def retrieve(task: asyncio.Task[None]) -> None:
    """Look at a refusal that no test awaits; else it is logged whenever the task is freed."""
    if not task.cancelled():
        task.exception()


async def order(shop: Workshop, count: int) -> str:
    """End one piece of work after another; return the owner of each next one."""
    names = ""
    for _ in range(count):
        before = set(shop.begun)
        await shop.end()
        (new,) = set(shop.begun) - before
        names += new[0].name[0]
    return names


async def test_one_who_asks_a_lot_does_not_keep_another_waiting():
    shop = Workshop()
    await shop.ask(ALICE, *[10] * 20)
    await shop.ask(BOB, 10)
    assert shop.names == "aa"
    assert await order(shop, 3) in ("baa", "aba")


async def test_turns_are_by_size_and_weight():
    shop = Workshop()
    await shop.ask(ALICE, *[10] * 20)
    await shop.ask(BOB, *[40] * 6)
    assert (await order(shop, 12)).count("b") in (2, 3), "four of hers for one of his"
    shop = Workshop()
    await shop.ask(ALICE, *[10] * 20)
    await shop.ask(Tenant(name="bob", weight=3.0), *[10] * 20)
    assert (await order(shop, 16)).count("b") in (11, 12, 13)


async def test_what_was_not_used_is_not_kept():
    shop = Workshop()
    await shop.ask(ALICE, *[10] * 100)
    await order(shop, 50)
    await shop.ask(BOB, *[10] * 50)
    assert (await order(shop, 20)).count("b") in range(9, 13)


async def test_short_work_never_waits_for_long_work():
    shop = Workshop()
    await shop.ask(ALICE, LONG + 1, LONG + 1)
    await shop.ask(BOB, LONG + 1)
    assert shop.names == "a"
    await shop.ask(ALICE, 1)
    assert shop.names == "aa"
    await shop.end()
    assert shop.names == "a"
    await shop.end(long=True)
    assert shop.names == "b"


async def test_what_waits_is_bounded_for_each_tenant():
    shop = Workshop(max_waiting=30)
    await shop.ask(ALICE, 10, 10, 10, 10, 10)
    await shop.ask(BOB, 90)
    with pytest.raises(RpcError) as caught:
        await shop.turns.run(ALICE, 1, nothing, "nothing")
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await shop.end()
    await shop.end()
    await shop.ask(ALICE, 1)
    assert not any(task.done() and task.exception() for task in shop.tasks)


async def test_one_who_leaves_takes_no_turn():
    shop = Workshop()
    await shop.ask(ALICE, 10, 10, 10, 10)
    for task in shop.tasks[2:]:
        task.cancel()
    await shop.settle()
    await shop.end()
    await shop.end()
    assert shop.names == ""
    # One is cancelled when its turn comes.
    await shop.ask(ALICE, 10, 10, 10)
    *_, ended = shop.begun.pop(0)
    ended.set()
    shop.tasks[-1].cancel()
    await shop.settle()
    await shop.end()
    await shop.ask(BOB, 10, 10)
    assert shop.names == "bb"
    assert not shop.turns._waiting


async def test_one_who_leaves_while_its_work_runs_keeps_its_slot_until_the_end():
    shop = Workshop()
    await shop.ask(ALICE, 10, 10, 10)
    for task in shop.tasks[:2]:
        task.cancel()
    await shop.settle()
    assert shop.names == "aa"
    await shop.end()
    await shop.end()
    assert shop.names == "a"


async def test_work_that_fails_or_is_cancelled_frees_its_slot():
    turns = Turns(2, LONG, 1000)

    async def fail() -> None:
        raise ValueError("no")

    async def cancel() -> None:
        raise asyncio.CancelledError

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            await turns.run(ALICE, 1, fail, "fail")
        with pytest.raises(asyncio.CancelledError):
            await turns.run(ALICE, 1, cancel, "cancel")
    await asyncio.wait_for(turns.run(ALICE, 1, nothing, "nothing"), 1)


@pytest.mark.parametrize("seed", range(5))
async def test_whoever_leaves_whenever_no_slot_is_lost(seed):
    """Two departures at a bad moment once took all slots for ever."""
    random = Random(seed)
    shop = Workshop(places=3)
    for _ in range(300):
        if random.random() < 0.5:
            shop.start(random.choice([ALICE, BOB]), random.choice([1, LONG + 1]))
        if shop.tasks and random.random() < 0.5:
            random.choice(shop.tasks).cancel()
        if shop.begun and random.random() < 0.4:
            shop.begun.pop(random.randrange(len(shop.begun)))[2].set()
        if random.random() < 0.5:
            await asyncio.sleep(0)
    await shop.settle()
    while shop.begun:
        shop.begun.pop()[2].set()
        await shop.settle()
    assert all(task.done() for task in shop.tasks)
    await shop.ask(ALICE, 1, 1, 1)
    assert shop.names == "aaa"


async def nothing() -> None:
    """Do nothing."""
