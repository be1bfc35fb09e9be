"""With async scheduling, beam searches and scored prompts keep nobody else waiting."""

import pytest

from octavo.engine.commands import Abort
from octavo.engine.scheduling.request import BeamSearch
from octavo.engine.scheduling.sequence import GroupState
from tests.engine.test_async_scheduling import engine


def end(stepper, group, how):
    """End a request as its client or its deadline does."""
    if how == "abort":
        stepper.core.handle(Abort(0, group.request.request_id, None))
    else:
        stepper.core._expire()


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_search_that_ends_while_its_step_runs_is_dropped(tiny_model, how):
    stepper = engine(tiny_model, async_scheduling=True)
    deadline = 1e-9 if how == "deadline" else None
    group = stepper.submit(range(3, 10), 6, beam=BeamSearch(2), deadline=deadline)
    for _ in range(3):
        stepper.step()
    assert stepper.core._pending is not None
    end(stepper, group, how)
    stepper.run()
    assert group.state is GroupState.FINISHED
    assert group.beam.hypotheses == []
    assert stepper.core.idle
