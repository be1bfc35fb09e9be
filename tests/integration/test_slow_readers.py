"""Clients that never read cost no memory and do not slow down others.

A short run of benchmarks/slow_readers.py.
"""

from benchmarks import slow_readers

SLEEPERS = 50
MIB = 1 << 20


async def test_clients_that_never_read(tmp_path):
    async with slow_readers.service(tmp_path, step_seconds=0.004) as servers:
        for company in ("alone", "beside sleepers"):
            outcome = await slow_readers.measure(servers, company, others=SLEEPERS, tokens=400)
    assert outcome.tokens == 400
    assert outcome.running == 0, "the engine still works for those who do not read"
    assert outcome.grown < 32 * MIB
