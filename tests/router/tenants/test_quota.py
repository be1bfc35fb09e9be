import contextlib

import grpc
import pytest
from prometheus_client import CollectorRegistry

from octavo.common import rpc
from octavo.router.metrics import RouterMetrics
from octavo.router.tenants.quota import Account, Bucket
from octavo.router.tenants.tenant import ANONYMOUS, Tenant


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def account_of(clock):
    """Returns a tenant's new account."""
    metrics = RouterMetrics(CollectorRegistry(), in_flight=int, queued=int)
    return lambda tenant: Account(tenant, metrics, clock)


def refusal(account):
    with pytest.raises(rpc.RpcError) as caught, account.request():
        pass
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return caught.value


def test_a_bucket_fills_up_to_its_capacity_and_may_be_owed(clock):
    bucket = Bucket(2.0, 10.0, clock)
    clock.now += 100
    assert bucket.level == 10
    bucket.take(16)
    assert bucket.level == -6
    assert bucket.seconds_until(0) == 3
    clock.now += 3
    assert (bucket.level, bucket.seconds_until(0)) == (0, 0)
    bucket.resize(1.0, 1.0)
    clock.now += 5
    assert bucket.level == 1


def test_calls_come_at_a_rate(account_of, clock):
    account = account_of(Tenant("a", requests_per_second=2))
    for _ in range(2):
        with account.request():
            pass
    error = refusal(account)
    assert error.retry_after == 0.5
    assert "requests_per_second" in error.message
    clock.now += error.retry_after
    account.call()
    with pytest.raises(rpc.RpcError):
        account.call()


def test_less_than_a_call_a_second_is_one_at_a_time(account_of, clock):
    account = account_of(Tenant("a", requests_per_second=0.1))
    account.call()
    assert refusal(account).retry_after == 10
    clock.now += 10
    account.call()


def test_what_requests_may_take_is_set_aside_before_they_begin(account_of, clock):
    account = account_of(Tenant("a", tokens_per_minute=300))
    with contextlib.ExitStack() as running:
        for _ in range(3):
            running.enter_context(account.request()).reserve(100)
        error = refusal(account)
        assert "has 0 left of 300 tokens a minute (tokens_per_minute)" in error.message
        clock.now += 10
        with account.request() as usage, pytest.raises(rpc.RpcError) as caught:
            usage.reserve(100)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after == 10
        clock.now += 10
        running.enter_context(account.request()).reserve(100)


def test_what_was_set_aside_and_not_used_is_given_back(account_of):
    account = account_of(Tenant("a", tokens_per_minute=300))
    for _ in range(5):
        with account.request() as usage:
            usage.reserve(200)
            usage.prompt(10)
            for _ in range(3):
                usage.output(1)
    assert account.tokens.level == 300 - 5 * 13
    with contextlib.suppress(ZeroDivisionError), account.request() as usage:
        usage.reserve(200)
        raise ZeroDivisionError  # before anything was computed
    assert account.tokens.level == 300 - 5 * 13


def test_more_than_was_set_aside_is_owed(account_of, clock):
    account = account_of(Tenant("a", tokens_per_minute=60))
    with account.request() as usage:
        usage.reserve(50)
        usage.prompt(40)
        for _ in range(30):
            usage.output(1)
    assert account.tokens.level == -10
    assert refusal(account).retry_after == 12  # the fewest tokens of a request are two
    clock.now += 12
    with account.request():
        pass


def test_more_than_a_minute_s_tokens_wait_for_all_of_them(account_of, clock):
    account = account_of(Tenant("a", tokens_per_minute=60))
    with account.request() as usage:
        usage.reserve(1000)
        usage.prompt(5)
    with account.request() as usage, pytest.raises(rpc.RpcError) as caught:
        usage.reserve(1000)
    assert caught.value.retry_after == 5
    clock.now += 5
    with account.request() as usage:
        usage.reserve(1000)
        usage.prompt(500)
        usage.output(500)
    assert account.tokens.level == 60 - 1000


def test_a_place_is_free_when_a_request_ends_however_it_does(account_of):
    account = account_of(Tenant("a", max_concurrency=1))
    with contextlib.suppress(ZeroDivisionError), account.request():
        assert "max_concurrency" in refusal(account).message
        raise ZeroDivisionError
    with account.request():
        pass


def test_a_refused_request_costs_nothing(account_of, clock):
    account = account_of(Tenant("a", max_concurrency=1, requests_per_second=2))
    with account.request():
        for _ in range(5):
            assert "max_concurrency" in refusal(account).message
    with account.request():
        pass


def test_new_limits_hold_at_once_and_debts_stay(account_of, clock):
    account = account_of(Tenant("a", tokens_per_minute=60))
    with account.request() as usage:
        usage.reserve(60)
        usage.prompt(118)
    assert refusal(account).retry_after == 60
    account.tenant = Tenant("a", tokens_per_minute=600)
    assert refusal(account).retry_after == 6
    with contextlib.ExitStack() as running:
        account.tenant = Tenant("a")
        usage = running.enter_context(account.request())
        usage.reserve(10**9)
        account.tenant = Tenant("a", tokens_per_minute=60)
        account.tokens.take(50)
    assert account.tokens.level == 10  # it returns only what it took


def test_anonymous_callers_have_no_limits(account_of):
    account = account_of(ANONYMOUS)
    for _ in range(100):
        account.call()
    with account.request() as usage, account.request():
        usage.reserve(10**9)
        usage.prompt(10**9)
