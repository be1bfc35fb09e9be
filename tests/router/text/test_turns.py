"""Tenants take turns with the tokenizer."""

import asyncio

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
            self.tasks.append(asyncio.create_task(self._work(tenant, size)))
        await self.settle()

    async def _work(self, tenant: Tenant, size: int) -> None:
        await self.turns.take(tenant, size)
        self.begun.append((tenant, size, object()))

    async def end(self, *, long: bool = False) -> None:
        """End the oldest piece of work."""
        work = next(work for work in self.begun if (work[1] > LONG) == long)
        self.begun.remove(work)
        self.turns.give_back(work[1])
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def names(self) -> str:
        return "".join(tenant.name[0] for tenant, _, _ in self.begun)


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
        await shop.turns.take(ALICE, 1)
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
    _, size, _ = shop.begun.pop(0)
    shop.turns.give_back(size)
    shop.tasks[-1].cancel()
    await shop.settle()
    await shop.end()
    await shop.ask(BOB, 10, 10)
    assert shop.names == "bb"
    assert not shop.turns._waiting


async def test_one_who_leaves_just_before_a_turn_is_free_takes_none():
    """Two such departures once took all turns for ever."""
    turns = Turns(2, 100, 1000)
    tenant = Tenant("a")
    for _ in range(3):
        for _ in range(2):
            await turns.take(tenant, 1)
        leaving = [asyncio.create_task(turns.take(tenant, 1)) for _ in range(2)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        turns.give_back(1)
        turns.give_back(1)
        await asyncio.gather(*leaving, return_exceptions=True)
        assert all(task.cancelled() for task in leaving)
    for _ in range(2):
        await asyncio.wait_for(turns.take(tenant, 1), 1)
