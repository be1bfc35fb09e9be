"""Under load, engines die, drain, hang and are cut off: requests migrate unnoticed.

A short run of benchmarks/migration.py.
"""

import pytest

from benchmarks import fixture, migration
from octavo import AsyncClient

STREAMS = 16
QUICK = ("kill", "drain", "cut")
"""For a router, hanging and cut-off engines look alike: both are silent."""


@pytest.mark.parametrize(
    "troubles",
    [QUICK, pytest.param(tuple(migration.TROUBLES), marks=pytest.mark.slow)],
    ids=["quick", "all"],
)
async def test_outputs_are_those_of_an_undisturbed_run(troubles, tmp_path):
    model = migration.make_model(tmp_path)
    async with migration.cluster(model, 3) as cluster:
        async with AsyncClient(cluster.router.address) as client:
            asks = await migration.settle(client, migration.make_asks(STREAMS, tokens=60))
        assert {ask.kind for ask in asks} == migration.KINDS.keys()
        for name in troubles:
            trouble = migration.TROUBLES[name]
            outcome = await migration.run(cluster, asks, trouble, streams=STREAMS, times=1, every=1)
            assert outcome.failures == [], name
            assert outcome.different == [], name
            assert outcome.completed >= STREAMS, name
            assert outcome.migrations > 0, name
            await fixture.all_up(cluster.router, 3)
