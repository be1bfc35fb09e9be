"""Tenants' quotas: calls, tokens and requests in progress."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from octavo.common import rpc
from octavo.router.metrics import RouterMetrics
from octavo.router.tenants.tenant import Tenant

BUSY_SECONDS = 1.0
"""Retry delay in seconds after too many requests in progress, as their ends are unknown."""

MIN_TOKENS = 2
"""Minimum tokens of a request: one prompt token and one output token."""

Clock = Callable[[], float]


class Bucket:
    """A token bucket that may go into debt.

    Args:
        rate: Refill rate per second.
        capacity: Maximum level, which is also the initial one.
        clock: Monotonic clock in seconds.
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
        """Current level; negative: debt."""
        now = self._clock()
        self._level = min(self._level + (now - self._time) * self._rate, self._capacity)
        self._time = now
        return self._level

    def take(self, amount: float) -> None:
        """Remove an amount, into debt if necessary; a negative amount is returned."""
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        """Return the seconds until a level is reached; it must not exceed the capacity."""
        return max(level - self.level, 0.0) / self._rate

    def resize(self, rate: float, capacity: float) -> None:
        """Change rate and capacity; debt stays."""
        self._level = min(self.level, capacity)
        self._rate, self._capacity = rate, capacity


class Account:
    """One tenant's use of its quotas; changed limits keep the usage.

    Args:
        tenant: The tenant.
        metrics: The metrics of token usage.
        clock: Monotonic clock in seconds.
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
        """Count a request while it is in progress; yield its token usage.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if one of the tenant's limits is reached.
        """
        limit = self._tenant.max_concurrency
        if limit is not None and self._running >= limit:
            raise self._over(f"has {limit} requests in progress (max_concurrency)", BUSY_SECONDS)
        self.check_tokens(MIN_TOKENS)  # before the tokenizer's work
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
            rpc.RpcError: RESOURCE_EXHAUSTED if the tenant made too many calls recently.
        """
        if self._calls is None:
            return
        wait = self._calls.seconds_until(1)
        if wait:
            limit = f"{self._tenant.requests_per_second:g} a second (requests_per_second)"
            raise self._over(f"has made more calls than {limit}", wait)
        self._calls.take(1)

    def ended(self, code: grpc.StatusCode) -> None:
        """Count an ended request by its status."""
        self._requests.labels(self._tenant.name, code.name).inc()

    @property
    def tokens(self) -> Bucket | None:
        """The bucket of tokens that the tenant may use; None: no limit."""
        return self._tokens

    def check_tokens(self, wanted: int) -> None:
        """Raise if the quota has too few tokens for a request to start.

        A request that needs more than a minute's quota may start when the bucket is full.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if the request may not start now.
        """
        if self._tokens is None:
            return
        wait = self._tokens.seconds_until(min(wanted, self._tokens.capacity))
        if wait:
            limit = f"{self._tenant.tokens_per_minute:g} tokens a minute (tokens_per_minute)"
            left = max(math.floor(self._tokens.level), 0)
            raise self._over(f"has {left} left of {limit}, too few for this request", wait)

    def count(self, *, prompt: int = 0, output: int = 0) -> None:
        """Add used tokens to the metrics."""
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
    """The tokens of one request: reserved at admission, settled at its end.

    Args:
        account: The tenant's account.
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
        """Reserve the tokens that the request may use, before it uses any.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if the tenant's quota has fewer tokens left.
        """
        self._account.check_tokens(tokens)
        self._bucket = self._account.tokens
        if self._bucket is not None:
            self._reserved = tokens
            self._bucket.take(tokens)

    def prompt(self, tokens: int) -> None:
        """Count the prompt, which an engine has begun to compute."""
        self._account.count(prompt=tokens)
        self._use(tokens)

    def output(self, tokens: int) -> None:
        """Count sampled tokens."""
        self._account.count(output=tokens)
        self._use(tokens)

    def settle(self) -> None:
        """Return unused reserved tokens at the request's end."""
        if self._bucket is not None and self._used < self._reserved:
            self._bucket.take(self._used - self._reserved)
        self._bucket = None

    def _use(self, tokens: int) -> None:
        """Charge the tokens that exceed the reservation."""
        self._used += tokens
        if self._bucket is None:
            return
        beyond = min(self._used - self._reserved, tokens)
        if beyond > 0:
            self._bucket.take(beyond)
