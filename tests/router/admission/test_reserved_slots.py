"""The number of slots reserved for the least served tenant."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.router.admission.reserved_slots import (
    MAX_RESERVED_SHARE,
    RECENT_REQUESTS,
    SPARE_SHARE,
    bursts,
    reserved_slots,
)

SLOTS = 48
SPARED = 4
STEADY = [0.1 * i for i in range(1, 41)]  # one ends every 100 ms
TOGETHER = [4.0] * 40


def asking(*times: float, sequences: int = 1):
    return bursts(tuple((time, sequences) for time in times[-RECENT_REQUESTS:]))


def test_a_burst_is_the_shortest_time_for_each_count():
    asked = ((0.0, 1), (0.5, 2), (1.25, 1), (1.5, 1), (3.0, 2))
    assert [tuple(burst) for burst in bursts(asked)] == [
        *((1, 0.0), (2, 0.0), (3, 0.5), (4, 1.0), (5, 1.5), (6, 2.5), (7, 3.0))
    ]


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, 3)), max_size=2 * RECENT_REQUESTS))
def test_a_burst_never_takes_longer_for_fewer(asked):
    found = bursts(tuple(sorted(asked)))
    assert [sequences for sequences, _ in found] == sorted({sequences for sequences, _ in found})
    assert [seconds for _, seconds in found] == sorted(seconds for _, seconds in found)


def test_few_are_reserved_where_others_fall_free_in_time():
    one_a_second = asking(*range(10))
    assert reserved_slots(SLOTS, one_a_second, STEADY) == 1 + SPARED


def test_more_are_reserved_where_none_falls_free_for_long():
    one_a_second = asking(*range(10))
    assert reserved_slots(SLOTS, one_a_second, TOGETHER) == 4 + SPARED, "at 0, 1, 2 and 3"


def test_those_that_come_at_once_count_at_once():
    assert reserved_slots(SLOTS, asking(0.0, 20.0, sequences=6), STEADY) == 6 + SPARED


def test_what_is_reserved_has_its_bounds():
    assert SPARED == SLOTS * SPARE_SHARE
    assert reserved_slots(SLOTS, (), STEADY) == SPARED
    assert reserved_slots(SLOTS, asking(*[0.0] * 64), []) == SLOTS * MAX_RESERVED_SHARE
    assert reserved_slots(1, asking(*[0.0] * 64), []) == 0, "of one, none"
