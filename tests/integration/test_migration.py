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
    ("roles", "troubles"),
    [
        (["both", "both", "both"], QUICK),
        pytest.param(["decode", "prefill", "decode"], QUICK, marks=pytest.mark.slow),
        pytest.param(3 * ["both"], tuple(migration.TROUBLES), marks=pytest.mark.slow),
    ],
    ids=["quick", "all roles", "all"],
)
async def test_outputs_are_those_of_an_undisturbed_run(roles, troubles, tmp_path):
    model = migration.make_model(tmp_path)
    asks = migration.make_asks(STREAMS, 60, 100 if "both" in roles else 500)
    alone = migration.cluster(model, ["both"])
    async with alone as one, AsyncClient(one.router.address) as client:
        asks = await migration.settle(client, asks)
    assert {ask.kind for ask in asks} == migration.KINDS.keys()
    async with migration.cluster(model, roles) as cluster:
        async with AsyncClient(cluster.router.address) as client:
            assert await migration.settle(client, asks) == asks
        handovers = cluster.router.metrics().value("octavo_router_handovers_total")
        assert (handovers > 0) is ("prefill" in roles)
        for name in troubles:
            trouble = migration.TROUBLES[name]
            times = 2 if "prefill" in roles else 1  # each suffers in turn
            outcome = await migration.run(
                cluster, asks, trouble, streams=STREAMS, times=times, every=1
            )
            assert outcome.failures == [], name
            assert outcome.different == [], name
            assert outcome.completed >= STREAMS, name
            assert outcome.migrations > 0, name
            await fixture.all_up(cluster.router, 3)
