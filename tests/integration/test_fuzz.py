"""Clients that break every rule leave router and engine as they were.

benchmarks/fuzz in short.
"""

import pytest

from benchmarks.fuzz.fixture import service
from benchmarks.fuzz.run import Outcome, fuzz

CASES = 600


@pytest.mark.slow  # test_bad_input.py covers each kind of call
async def test_rude_clients_leave_no_trace(tmp_path):
    outcome = Outcome()
    async with service(tmp_path) as servers:
        await fuzz(servers, 0, range(CASES), outcome)
    assert not outcome.faults, "\n".join(outcome.faults)
    assert outcome.cases == CASES
    codes = {code for _, code in outcome.answers}
    assert {"OK", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "CANCELLED", "NOT_FOUND"} <= codes
    assert outcome.attacks
    assert outcome.after["engine"].blocks == 0
