"""Tenants' quotas: calls, tokens, requests in progress; and their use."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from octavo.common import rpc
from octavo.router.metrics import RouterMetrics
from octavo.router.tenants.tenant import Tenant

BUSY_SECONDS = 1.0
"""Seconds to wait after too many requests in progress, as nobody knows when one will end."""

MIN_TOKENS = 2
"""Minimum tokens of a request: one of the prompt and one of the output."""

Clock = Callable[[], float]


class Bucket:
    """A token bucket that may go into debt.

    Args:
        rate: Refill per second.
        capacity: Maximum level, and the level at first.
        clock: Returns seconds, monotonic.
    """

    def __init__(self, rate: float, capacity: float, clock: Clock = time.monotonic) -> None:
        self._rate = rate
        self._capacity = capacity
        self._clock = clock
        self._level = capacity
        self._time = clock()

    @property
    def capacity(self) -> float:
        """Maximum level."""
        return self._capacity

    @property
    def level(self) -> float:
        """Current level; negative for debt."""
        now = self._clock()
        self._level = min(self._level + (now - self._time) * self._rate, self._capacity)
        self._time = now
        return self._level

    def take(self, amount: float) -> None:
        """Take an amount, into debt if need be; a negative amount is given back."""
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        """Return the seconds until the level is reached; it must not exceed the capacity."""
        return max(level - self.level, 0.0) / self._rate

    def resize(self, rate: float, capacity: float) -> None:
        """Change rate and capacity from now on; debt stays."""
        self._level = min(self.level, capacity)
        self._rate, self._capacity = rate, capacity


class Account:
    """One tenant's use of its quotas; a tenant with new limits keeps what it used.

    Args:
        tenant: The tenant.
        metrics: The metrics that show its use.
        clock: Returns seconds, monotonic.
    """

    def __init__(
        self, tenant: Tenant, metrics: RouterMetrics, clock: Clock = time.monotonic
    ) -> None:
        self._requests = metrics.tenant_requests
        self._prompts = metrics.tenant_tokens.labels(tenant.name, "prompt")
        self._outputs = metrics.tenant_tokens.labels(tenant.name, "output")
        self._clock = clock
        self._running = 0
        self._calls: Bucket | None = None
        self._tokens: Bucket | None = None
        self._limit(tenant)

    @property
    def tenant(self) -> Tenant:
        """The tenant, with its current limits."""
        return self._tenant

    @tenant.setter
    def tenant(self, tenant: Tenant) -> None:
        if self._tenant is not tenant:
            self._limit(tenant)

    def _limit(self, tenant: Tenant) -> None:
        self._tenant = tenant
        calls, tokens = tenant.requests_per_second, tenant.tokens_per_minute
        self._calls = self._sized(self._calls, calls, max(calls or 0.0, 1.0))
        self._tokens = self._sized(self._tokens, tokens and tokens / 60, tokens or 0.0)

    @contextmanager
    def request(self) -> Iterator["RequestUsage"]:
        """Count a request from its beginning to its end; yield the counter of its tokens.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if one of the tenant's limits is reached.
        """
        limit = self._tenant.max_concurrency
        if limit is not None and self._running >= limit:
            raise self._over(f"has {limit} requests in progress (max_concurrency)", BUSY_SECONDS)
        self.check_tokens(MIN_TOKENS)  # before the work of counting them
        self.call()
        self._running += 1
        usage = RequestUsage(self)
        try:
            yield usage
        finally:
            self._running -= 1
            usage.settle()

    def call(self) -> None:
        """Count a call.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if there were too many recently.
        """
        if self._calls is None:
            return
        wait = self._calls.seconds_until(1)
        if wait:
            limit = f"{self._tenant.requests_per_second:g} a second (requests_per_second)"
            raise self._over(f"has made more calls than {limit}", wait)
        self._calls.take(1)

    def ended(self, code: grpc.StatusCode) -> None:
        """Count how a request ended."""
        self._requests.labels(self._tenant.name, code.name).inc()

    @property
    def tokens(self) -> Bucket | None:
        """The tokens that the tenant may use now; None for no limit."""
        return self._tokens

    def check_tokens(self, wanted: int) -> None:
        """Check that a request of so many tokens may begin.

        One of more than a minute's worth may begin when a whole minute's is there.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if not now.
        """
        if self._tokens is None:
            return
        wait = self._tokens.seconds_until(min(wanted, self._tokens.capacity))
        if wait:
            limit = f"{self._tenant.tokens_per_minute:g} tokens a minute (tokens_per_minute)"
            left = max(math.floor(self._tokens.level), 0)
            raise self._over(f"has {left} left of {limit}, too few for this request", wait)

    def count(self, *, prompt: int = 0, output: int = 0) -> None:
        """Count used tokens in the metrics."""
        if prompt:
            self._prompts.inc(prompt)
        if output:
            self._outputs.inc(output)

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


class RequestUsage:
    """The tokens of one request: reserved when it is admitted, settled when it ends.

    Args:
        account: Its tenant's account.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._bucket: Bucket | None = None
        self._reserved = 0
        self._used = 0

    @property
    def tenant(self) -> Tenant:
        """The tenant of the request."""
        return self._account.tenant

    def reserve(self, tokens: int) -> None:
        """Reserve the tokens that the request may use; once, before it uses any.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if the tenant has fewer left.
        """
        self._account.check_tokens(tokens)
        self._bucket = self._account.tokens
        if self._bucket is not None:
            self._reserved = tokens
            self._bucket.take(tokens)

    def prompt(self, tokens: int) -> None:
        """Count the prompt: an engine has begun to compute it."""
        self._account.count(prompt=tokens)
        self._use(tokens)

    def output(self, tokens: int) -> None:
        """Count tokens that were sampled."""
        self._account.count(output=tokens)
        self._use(tokens)

    def settle(self) -> None:
        """Give back what was reserved and not used: the request has ended."""
        if self._bucket is not None and self._used < self._reserved:
            self._bucket.take(self._used - self._reserved)
        self._bucket = None

    def _use(self, tokens: int) -> None:
        """Take from the bucket what exceeds the reservation."""
        self._used += tokens
        if self._bucket is None:
            return
        beyond = min(self._used - self._reserved, tokens)
        if beyond > 0:
            self._bucket.take(beyond)
