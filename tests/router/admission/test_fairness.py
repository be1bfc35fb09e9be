from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.common.priority import PRIORITY_SECONDS
from octavo.router.admission.claims import OUTPUT_WEIGHT, Claim
from octavo.router.admission.output_lengths import OutputLengths
from octavo.router.admission.queue import FairQueue
from octavo.router.admission.rates import RECENT_SECONDS
from octavo.router.tenants.tenant import Tenant
from tests.router.admission.fixture import request

MOST = 40
"""Maximum tokens of prompts and of outputs here."""


@dataclass
class Line:
    """A queue whose engine takes one request at a time, on demand."""

    queue: FairQueue
    number: int = 0

    def ask(self, tenant: Tenant, prompt=10, output=10, *, priority=0, arrival=0.0) -> Claim:
        state = request(
            arrival,
            priority=priority,
            prompt_tokens=prompt,
            min_tokens=output,
            max_tokens=output,
            tenant=tenant,
        )
        self.number += 1
        claim = Claim(state, OutputLengths(), self.number)
        self.queue.push(claim)
        return claim

    def serve(self, now: float = 0.0, sampled: int | None = None) -> Claim:
        """Serve the next request; it ends with all of its tokens, or after `sampled`."""
        claim = self.queue.first(now)
        self.queue.remove(claim)
        self.queue.admit(claim)
        claim.state.output_tokens = claim.request.max_tokens if sampled is None else sampled
        self.queue.settle(claim)
        return claim


@pytest.fixture
def line() -> Line:
    return make_line()


def make_line() -> Line:
    queue = FairQueue()
    return Line(queue)


def tenants_of(claims) -> str:
    return "".join(claim.tenant for claim in claims)


A, B, C = Tenant("a"), Tenant("b"), Tenant("c")


def test_the_least_served_goes_next(line):
    for _ in range(6):
        line.ask(A)
    for _ in range(3):
        line.ask(B)
    assert tenants_of(line.serve() for _ in range(6)) == "ababab"
    assert tenants_of(line.serve() for _ in range(3)) == "aaa"


def test_tokens_are_counted_and_not_requests(line):
    for _ in range(6):
        line.ask(A, prompt=10, output=30)
        line.ask(B, prompt=10, output=5)
    served = [line.serve() for _ in range(7)]
    assert tenants_of(served).count("b") == 5


def test_weights_are_shares(line):
    double = Tenant("d", 2.0)
    for _ in range(9):
        line.ask(A)
        line.ask(double)
    assert tenants_of(line.serve() for _ in range(9)).count("d") == 6


LARGE = {"prompt": 1024, "output": 512}
"""A tenant's idle time earns at most two such requests."""


def test_credit_for_idle_time_is_limited(line):
    for _ in range(20):
        line.ask(A, **LARGE)
    for _ in range(10):
        line.serve()
    for _ in range(10):
        line.ask(B, **LARGE)
    served = tenants_of(line.serve() for _ in range(12))
    assert served.startswith("bb"), "a few at once do not wait for their share"
    assert served.count("b") == 7


def test_credit_for_time_without_a_queue_is_limited(line):
    for _ in range(10):
        line.ask(A, **LARGE)
        line.serve()
    for _ in range(10):  # the queue is empty when b comes, and a was served a lot
        line.ask(B, **LARGE)
    for _ in range(10):
        line.ask(A, **LARGE)
    assert tenants_of(line.serve() for _ in range(12)).count("a") >= 5


def test_slots_are_reserved_for_the_least_served_of_those_active():
    queue = FairQueue()
    queue.asked(A, 1, 0.0)
    assert queue.is_least("a", 0.0), "it is alone"
    queue.asked(B, 1, 1.0)
    line = Line(queue)
    line.ask(A)
    line.serve()
    assert not queue.is_least("a", 1.0)
    assert queue.is_least("b", 1.0)
    assert queue.is_least("a", 2.0 + RECENT_SECONDS), "b has gone"


def test_shares_go_by_weights_of_those_active():
    queue = FairQueue()
    heavy = Tenant("heavy", weight=3.0)
    queue.asked(A, 1, 0.0)
    assert queue.share(A, 0.0) == 1.0
    queue.asked(heavy, 1, 5.0)
    assert (queue.share(A, 5.0), queue.share(heavy, 5.0)) == (0.25, 0.75)
    assert queue.share(A, 5.0 + RECENT_SECONDS) == 0.25, "it waits, and asks no more"
    assert queue.share(heavy, 5.0 + RECENT_SECONDS) == 1.0, "the other has gone"
    assert queue.share(A, 6.0 + RECENT_SECONDS) == 1.0, "nobody asks"


def test_the_demand_looked_at_is_the_least_serveds():
    queue = FairQueue()
    assert not queue.bursts_of_least(0.0)
    for time in (0.0, 0.5, 3.0):
        queue.asked(B, 1, time)
    for _ in range(100):
        queue.asked(A, 1, 3.0)
    line = Line(queue)
    line.ask(A)
    line.serve()
    assert queue.bursts_of_least(3.0) == [(1, 0.0), (2, 0.5), (3, 3.0)]
    assert not queue.bursts_of_least(3.5 + RECENT_SECONDS), "all have gone"


def test_tenants_are_charged_for_tokens_drawn(line):
    line.ask(A, prompt=10, output=40)
    line.serve(sampled=5)
    assert line.queue.served("a") == 10 + 5 * OUTPUT_WEIGHT
    claim = line.ask(A, prompt=10, output=1)
    line.queue.remove(claim)
    line.queue.admit(claim)
    before = line.queue.served("a")
    claim.state.output_tokens = 31
    line.queue.correct(claim)
    assert line.queue.served("a") == before + 30 * OUTPUT_WEIGHT


def test_a_request_without_output_is_not_charged(line):
    line.ask(A)
    line.serve(sampled=0)
    assert line.queue.served("a") == 0


def test_priority_goes_before_fairness_until_others_have_waited(line):
    for _ in range(4):
        line.ask(A, priority=1)
    for _ in range(2):
        line.ask(B)
    assert tenants_of(line.serve(now=PRIORITY_SECONDS / 2) for _ in range(2)) == "aa"
    assert tenants_of(line.serve(now=PRIORITY_SECONDS) for _ in range(2)) == "bb"


def test_each_tenants_own_go_by_priority_and_age(line):
    late = line.ask(A, arrival=2.0)
    early = line.ask(A, arrival=1.0)
    urgent = line.ask(A, arrival=3.0, priority=1)
    line.ask(B, arrival=0.0)
    own = [claim for claim in (line.serve(now=30.0) for _ in range(4)) if claim.tenant == "a"]
    assert own == [urgent, early, late]


def test_tokens_ahead_in_the_queue(line):
    for _ in range(10):
        line.ask(A, prompt=50, output=50)
    newcomer = line.ask(B, prompt=50, output=50)
    line.queue.remove(newcomer)
    assert line.queue.ahead(newcomer) == 0, "it is the other's turn at once"
    line.ask(B, prompt=50, output=50)
    newcomer.order = (0.0, line.number + 1)
    assert line.queue.ahead(newcomer) == pytest.approx(200), "its own, and as much of the other's"


SIZES = st.tuples(st.integers(1, MOST), st.integers(1, MOST))


@given(
    weights=st.tuples(st.sampled_from([0.5, 1.0, 2.0, 4.0]), st.sampled_from([1.0, 3.0])),
    sizes=st.tuples(st.lists(SIZES, min_size=60, max_size=60), st.lists(SIZES, min_size=60)),
    others=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_backlogged_tenants_are_never_far_apart(weights, sizes, others):
    """The paper's bound, for charges at admission: one request, divided by the lesser weight."""
    line = make_line()
    pair = [Tenant(name, weight) for name, weight in zip("ab", weights, strict=True)]
    for tenant, requests in zip(pair, sizes, strict=True):
        for prompt, output in requests:
            line.ask(tenant, prompt, output)
    bound = MOST * (1 + OUTPUT_WEIGHT) / min(weights)
    for other in others:
        if other:
            line.ask(C)
        line.serve()
        if all(name in tenants_of(line.queue) for name in "ab"):
            assert abs(line.queue.served("a") - line.queue.served("b")) <= bound


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2)), max_size=40))
def test_nobody_starves(requests):
    """Every waiting request is served, even if more urgent ones keep coming."""
    line = make_line()
    victim = line.ask(Tenant("v"), priority=-2)
    now = 0.0
    for name, priority in requests:
        line.ask(Tenant(name), priority=priority, arrival=now)
    for _ in range(len(requests) + 50):
        now += 1.0
        line.ask(A, priority=2, arrival=now)
        if line.serve(now) is victim:
            return
    raise AssertionError("it starved")
