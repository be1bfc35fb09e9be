import contextlib

import grpc
import pytest
from prometheus_client import CollectorRegistry

from octavo.common import rpc
from router.metrics import RouterMetrics
from router.quota import Accounts, Bucket
from router.tenants import ANONYMOUS, Tenant


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def accounts(clock):
    metrics = RouterMetrics(CollectorRegistry(), in_flight=int, queued=int)
    return Accounts(metrics, clock)


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


def test_calls_come_at_a_rate(accounts, clock):
    account = accounts.of(Tenant("a", requests_per_second=2))
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


def test_less_than_a_call_a_second_is_one_at_a_time(accounts, clock):
    account = accounts.of(Tenant("a", requests_per_second=0.1))
    account.call()
    assert refusal(account).retry_after == 10
    clock.now += 10
    account.call()


def test_tokens_are_charged_as_they_come_and_owed_before_they_are_refused(accounts, clock):
    account = accounts.of(Tenant("a", tokens_per_minute=60))
    with account.request():
        account.prompt(50)
    with account.request():
        for _ in range(20):
            account.output(1)
    error = refusal(account)
    assert error.retry_after == 10
    clock.now += 9.9
    refusal(account)
    clock.now += 0.1
    with account.request():
        pass


def test_a_place_is_free_when_a_request_ends_however_it_does(accounts):
    account = accounts.of(Tenant("a", max_concurrency=1))
    with contextlib.suppress(ZeroDivisionError), account.request():
        assert "max_concurrency" in refusal(account).message
        raise ZeroDivisionError
    with account.request():
        pass


def test_a_refused_request_costs_nothing(accounts, clock):
    account = accounts.of(Tenant("a", max_concurrency=1, requests_per_second=2))
    with account.request():
        for _ in range(5):
            assert "max_concurrency" in refusal(account).message
    with account.request():
        pass


def test_new_limits_hold_at_once_and_debts_stay(accounts, clock):
    account = accounts.of(Tenant("a", tokens_per_minute=60))
    account.prompt(120)
    assert refusal(account).retry_after == 60
    assert accounts.of(Tenant("a", tokens_per_minute=600)) is account
    assert refusal(account).retry_after == 6
    accounts.of(Tenant("a"))
    with account.request():
        pass


def test_anonymous_callers_have_no_limits(accounts):
    account = accounts.of(ANONYMOUS)
    for _ in range(100):
        account.call()
        account.prompt(10**9)
    with account.request(), account.request():
        pass
