"""How many places are kept for the least served tenant."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.router.admission.kept_places import (
    MAX_KEPT_SHARE,
    RECENT_REQUESTS,
    SPARE_SHARE,
    Demand,
    kept_places,
)

PLACES = 48
SPARED = 4
STEADY = [0.1 * i for i in range(1, 41)]  # one ends every 100 ms
TOGETHER = [4.0] * 40


def asking(*times: float, sequences: int = 1):
    demand = Demand()
    for time in times:
        demand.add(sequences, time)
    return demand.spans


def test_a_demand_is_the_shortest_time_for_each_count():
    demand = Demand()
    for time, sequences in ((0.0, 1), (0.5, 2), (1.25, 1), (1.5, 1), (3.0, 2)):
        demand.add(sequences, time)
    assert [tuple(span) for span in demand.spans] == [
        *((1, 0.0), (2, 0.0), (3, 0.5), (4, 1.0), (5, 1.5), (6, 2.5), (7, 3.0))
    ]


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, 3)), max_size=2 * RECENT_REQUESTS))
def test_a_demand_never_takes_longer_for_fewer(asked):
    demand = Demand()
    for time, sequences in sorted(asked):
        demand.add(sequences, time)
    spans = demand.spans
    assert [s.sequences for s in spans] == sorted({s.sequences for s in spans})
    assert [s.seconds for s in spans] == sorted(s.seconds for s in spans)


def test_few_are_kept_where_others_fall_free_in_time():
    one_a_second = asking(*range(10))
    assert kept_places(PLACES, one_a_second, STEADY) == 1 + SPARED


def test_more_are_kept_where_none_falls_free_for_long():
    one_a_second = asking(*range(10))
    assert kept_places(PLACES, one_a_second, TOGETHER) == 4 + SPARED, "at 0, 1, 2 and 3"


def test_those_that_come_at_once_count_at_once():
    assert kept_places(PLACES, asking(0.0, 20.0, sequences=6), STEADY) == 6 + SPARED


def test_what_is_kept_has_its_bounds():
    assert SPARED == PLACES * SPARE_SHARE
    assert kept_places(PLACES, (), STEADY) == SPARED
    assert kept_places(PLACES, asking(*[0.0] * 64), []) == PLACES * MAX_KEPT_SHARE
    assert kept_places(1, asking(*[0.0] * 64), []) == 0, "of one, none"
