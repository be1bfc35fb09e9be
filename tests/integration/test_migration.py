"""Engines die, hang and are cut off under load, and no client can tell: benchmarks/migration.py in
short."""

import pytest

from benchmarks import migration
from octavo import AsyncClient

STREAMS = 30


@pytest.mark.parametrize("trouble", migration.TROUBLES.values(), ids=migration.TROUBLES)
async def test_every_output_is_the_undisturbed_one(trouble, tmp_path):
    model = migration.make_model(tmp_path)
    async with migration.cluster(model, 3) as cluster:
        async with AsyncClient(cluster.router.address) as client:
            asks = await migration.settle(client, migration.make_asks(STREAMS, tokens=150))
        assert {ask.kind for ask in asks} == migration.KINDS.keys()
        outcome = await migration.run(cluster, asks, trouble, streams=STREAMS, times=2, every=2)
    assert outcome.failures == []
    assert outcome.different == []
    assert outcome.completed >= STREAMS
    assert outcome.moves > 0
