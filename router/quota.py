"""What tenants may use of the service: calls, tokens, places; and what they used."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from octavo.common import rpc
from router.metrics import RouterMetrics
from router.tenants import Tenant

BUSY_SECONDS = 1.0
"""When one may come again who has too many requests in progress: nothing tells when one ends."""

Clock = Callable[[], float]


class Bucket:
    """Something that comes at a rate, is kept up to a capacity, and may be owed.

    Args:
        rate: What comes a second.
        capacity: What is kept at most, and there at first.
        clock: Seconds, monotonic.
    """

    def __init__(self, rate: float, capacity: float, clock: Clock = time.monotonic) -> None:
        self._rate = rate
        self._capacity = capacity
        self._clock = clock
        self._level = capacity
        self._time = clock()

    @property
    def level(self) -> float:
        """What is there; below nothing, what is owed."""
        now = self._clock()
        self._level = min(self._level + (now - self._time) * self._rate, self._capacity)
        self._time = now
        return self._level

    def take(self, amount: float) -> None:
        """Takes an amount, whether it is there or not."""
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        """Returns when, at the earliest, so much is there; at most the capacity."""
        return max(level - self.level, 0.0) / self._rate

    def resize(self, rate: float, capacity: float) -> None:
        """Changes both from now on; what is owed stays owed."""
        self._level = min(self.level, capacity)
        self._rate, self._capacity = rate, capacity


class Account:
    """What one tenant uses."""

    def __init__(self, tenant: Tenant, metrics: RouterMetrics, clock: Clock) -> None:
        self._requests = metrics.tenant_requests
        self._prompts = metrics.tenant_tokens.labels(tenant.name, "prompt")
        self._outputs = metrics.tenant_tokens.labels(tenant.name, "output")
        self._clock = clock
        self._running = 0
        self._calls: Bucket | None = None
        self._tokens: Bucket | None = None
        self.tenant = tenant

    @property
    def tenant(self) -> Tenant:
        """Whose it is, with the limits that hold now."""
        return self._tenant

    @tenant.setter
    def tenant(self, tenant: Tenant) -> None:
        self._tenant = tenant
        calls, tokens = tenant.requests_per_second, tenant.tokens_per_minute
        self._calls = self._sized(self._calls, calls, max(calls or 0.0, 1.0))
        self._tokens = self._sized(self._tokens, tokens and tokens / 60, tokens or 0.0)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request from its beginning to its end.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if one of the tenant's limits is reached.
        """
        most = self._tenant.max_concurrency
        if most is not None and self._running >= most:
            raise self._over(f"has {most} requests in progress (max_concurrency)", BUSY_SECONDS)
        if self._tokens is not None and self._tokens.level < 0:
            limit = f"{self._tenant.tokens_per_minute:g} tokens a minute (tokens_per_minute)"
            raise self._over(f"has used more than {limit}", self._tokens.seconds_until(0))
        self.call()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def call(self) -> None:
        """Counts a call.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if there were too many of late.
        """
        if self._calls is None:
            return
        wait = self._calls.seconds_until(1)
        if wait:
            limit = f"{self._tenant.requests_per_second:g} a second (requests_per_second)"
            raise self._over(f"has made more calls than {limit}", wait)
        self._calls.take(1)

    def ended(self, code: grpc.StatusCode) -> None:
        """Counts how a request ended."""
        self._requests.labels(self._tenant.name, code.name).inc()

    def prompt(self, tokens: int) -> None:
        """Charges the prompt of a request that has begun."""
        self._prompts.inc(tokens)
        self._charge(tokens)

    def output(self, tokens: int) -> None:
        """Charges tokens that were drawn."""
        self._outputs.inc(tokens)
        self._charge(tokens)

    def _charge(self, tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens)

    def _sized(self, bucket: Bucket | None, rate: float | None, capacity: float) -> Bucket | None:
        if rate is None:
            return None
        if bucket is None:
            return Bucket(rate, capacity, self._clock)
        bucket.resize(rate, capacity)
        return bucket

    def _over(self, what: str, seconds: float) -> rpc.RpcError:
        seconds = math.ceil(seconds * 10) / 10
        return rpc.exhausted(
            f"tenant {self._tenant.name!r} {what}; retry in {seconds:g} s", seconds
        )


class Accounts:
    """Every tenant's account, by name: a tenant with new limits keeps what it used.

    Args:
        metrics: Where use is shown.
        clock: Seconds, monotonic.
    """

    def __init__(self, metrics: RouterMetrics, clock: Clock = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def of(self, tenant: Tenant) -> Account:
        """Returns a tenant's account, with the limits that it has now."""
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = Account(tenant, self._metrics, self._clock)
        elif account.tenant is not tenant:
            account.tenant = tenant
        return account
