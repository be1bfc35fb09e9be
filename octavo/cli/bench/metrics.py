"""Metrics of a run: throughput, latency, goodput.

METRICS in commands defines them, as in vLLM's serving benchmark; goodput is DistServe's: requests
per second within all objectives. Times are in seconds since the run's start unless stated;
distributions are in milliseconds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.cli.bench.settings import Objectives

OK = "OK"


@dataclass(frozen=True, slots=True)
class Record:
    """The outcome of one request.

    Attributes:
        index: Position in the workload.
        due: Scheduled sending time, from which latencies count.
        sent: Actual sending time.
        ended: End of the stream.
        message_times: Arrival of each message with tokens.
        message_tokens: Number of tokens in each of these messages; empty if unknown.
        prompt_tokens: Number of prompt tokens; the server counts this and the next two.
        cached_tokens: Prompt tokens found in the prefix cache.
        output_tokens: Tokens of all outputs.
        code: Name of the gRPC status or HTTP failure; see `openai_endpoint`.
        error: The server's message; empty for success.
    """

    index: int
    due: float
    sent: float
    ended: float
    message_times: tuple[float, ...] = ()
    message_tokens: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    code: str = OK
    error: str = ""

    @property
    def e2e(self) -> float:
        """Seconds from the due time to the end."""
        return self.ended - self.due

    @property
    def ttft(self) -> float:
        """Seconds from the due time to the first token, or to the end without tokens."""
        return (self.message_times[0] if self.message_times else self.ended) - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    @property
    def normalized(self) -> float | None:
        """Seconds per output token, including the wait for the first; None without tokens."""
        return self.e2e / self.output_tokens if self.output_tokens else None

    @property
    def read_tokens(self) -> int:
        """Tokens received, also by a failed request if the server counts them."""
        return sum(self.message_tokens) or self.output_tokens

    @property
    def itl(self) -> npt.NDArray[np.float64]:
        """Seconds between messages, [messages - 1]."""
        return np.diff(np.asarray(self.message_times))

    def meets(self, objectives: Objectives) -> bool:
        """Return whether the request succeeded within all objectives."""
        taken = ((self.ttft, objectives.ttft), (self.tpot, objectives.tpot))
        return self.code == OK and all(
            limit is None or seconds is None or seconds * 1e3 <= limit
            for seconds, limit in (*taken, (self.e2e, objectives.e2e))
        )


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample's mean and percentiles, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Metrics of one run.

    Attributes:
        seconds: Seconds from the first sending to the last end.
        requests: Successful requests, which all fields but `errors` describe.
        unfinished: Requests interrupted by ctrl-C.
        errors: Failed requests by code.
        tokens_per_message: Mean tokens per message; above 1 if the router joined tokens.
        goodput: Requests per second within the objectives; None without objectives.
        lag: Delay of sending after the due time.
        client_cpu_share: Share of one core used by the load generator.
        client_cpu_us_per_token: The load generator's CPU time per token read, in microseconds.
        normalized: Latency per output token; its mean is what the PagedAttention paper plots.
    """

    seconds: float
    requests: int
    unfinished: int
    errors: dict[str, int]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    tokens_per_message: float | None
    goodput: float | None
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    lag: Distribution | None
    client_cpu_share: float
    client_cpu_us_per_token: float | None
    normalized: Distribution | None = None


def compute_figures(
    records: Sequence[Record],
    *,
    seconds: float,
    cpu_seconds: float,
    unfinished: int = 0,
    objectives: Objectives | None = None,
) -> RunFigures:
    """Return the metrics of a run.

    Args:
        records: The ended requests.
        seconds: Duration of the run.
        cpu_seconds: CPU time of this process in the run.
        unfinished: Number of sent requests without a record.
        objectives: Latency objectives for goodput.
    """
    done = [record for record in records if record.code == OK]
    per_second = 1 / seconds if seconds else 0.0
    inputs = sum(record.prompt_tokens for record in done)
    outputs = sum(record.output_tokens for record in done)
    read = sum(record.read_tokens for record in records)
    messages = sum(len(record.message_times) for record in done)
    good = None if objectives is None else sum(record.meets(objectives) for record in done)
    return RunFigures(
        seconds=seconds,
        requests=len(done),
        unfinished=unfinished,
        errors=dict(sorted(Counter(r.code for r in records if r.code != OK).items())),
        input_tokens=inputs,
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=outputs,
        requests_per_s=len(done) * per_second,
        input_tokens_per_s=inputs * per_second,
        output_tokens_per_s=outputs * per_second,
        tokens_per_message=sum(r.read_tokens for r in done) / messages if messages else None,
        goodput=None if good is None else good * per_second,
        ttft=distribution([record.ttft for record in done]),
        tpot=distribution([tpot for record in done if (tpot := record.tpot) is not None]),
        itl=distribution(np.concatenate([r.itl for r in done]) if done else ()),
        e2e=distribution([record.e2e for record in done]),
        lag=distribution([record.sent - record.due for record in records]),
        client_cpu_share=cpu_seconds * per_second,
        client_cpu_us_per_token=cpu_seconds / read * 1e6 if read else None,
        normalized=distribution(
            [each for record in done if (each := record.normalized) is not None]
        ),
    )


def distribution(seconds: npt.ArrayLike) -> Distribution | None:
    """Return the distribution of times in seconds; None if empty."""
    times = np.asarray(seconds, dtype=np.float64) * 1e3
    if not times.size:
        return None
    p50, p90, p99 = np.percentile(times, (50, 90, 99))
    return Distribution(float(times.mean()), float(p50), float(p90), float(p99))
