"""AdminService's changes persist for a router that starts later."""

import grpc
import pytest

from octavo.common import rpc
from octavo.router.engines.changes import EngineChanges
from octavo.router.engines.discovery import Discovery

SETTINGS = ["a:1", "b:1", "dns:///x:1"]


def test_changes_hold_for_the_engines_of_the_settings():
    changes = EngineChanges()
    changes.add("c:1")
    changes.remove("a:1")
    changes.drain("b:1")
    again = EngineChanges.from_json(changes.to_json())
    assert again == changes
    assert again.known(SETTINGS) == ["b:1", "c:1"]
    assert again.drained == {"b:1"}
    changes.remove("c:1")
    changes.add("a:1")
    changes.add("b:1")  # it accepts requests again
    assert sorted(changes.known(SETTINGS)) == ["a:1", "b:1"]
    assert not changes.drained


async def test_a_router_that_starts_later_has_the_engines_as_they_were_left(scripted, serve):
    kept, drained, removed = [await scripted(name).start() for name in "abc"]
    answer = {engine.address for engine in (kept, drained, removed)}

    async def resolve(name, port):
        return set(answer)

    changes = EngineChanges()
    changes.drain(drained.address)
    changes.remove(removed.address)
    async with serve(scripted("static")) as s:
        found = Discovery(["dns:///all:1"], s.router.pool, 1.0, resolve, changes)
        await found.look()
        await s.up(3)
        assert s.router.pool.link(drained.address).draining
        assert not s.router.pool.link(kept.address).draining
        with pytest.raises(rpc.RpcError) as refused:
            s.router.pool.link(removed.address)
        assert refused.value.code is grpc.StatusCode.NOT_FOUND
        answer.discard(removed.address)
        await found.look()
        answer.add(removed.address)
        await found.look()
        await s.up(4)
    for engine in (kept, drained, removed):
        await engine.kill()
