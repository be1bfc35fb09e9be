"""The peers' samples and the rates computed from them."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.peers.workers.protocol import Outcome
from benchmarks.peers.workloads import Workload


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one workload.

    Attributes:
        round: Its number, from 0.
        workload: Its name.
        seconds: Duration.
        output_tokens: Number of output tokens, exactly as requested.
        first_token_seconds: Mean over its requests; None if not known.
        first_tokens: The first token of each output.
        note: The peer's choice of how to run it, if any.
    """

    round: int
    workload: str
    seconds: float
    output_tokens: int
    first_token_seconds: float | None
    first_tokens: tuple[int, ...]
    note: str = ""

    @staticmethod
    def of(number: int, workload: Workload, outcome: Outcome) -> "Sample":
        """Return the sample of an outcome in round `number`."""
        firsts = outcome.first_token_seconds
        return Sample(
            number,
            workload.name,
            outcome.seconds,
            workload.output_tokens,
            statistics.fmean(firsts) if firsts else None,
            tuple(output[0] for output in outcome.outputs),
            outcome.note,
        )

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds


@dataclass(slots=True)
class Result:
    """A peer's samples.

    Attributes:
        name: The peer's name.
        title: The peer's name in tables.
        weights: Type of its weights.
        versions: Versions of its packages.
        load_seconds: Seconds from each start of its process until it was ready.
        samples: Samples in the order they were taken.
        failure: Reason why it could not be installed or run; empty if it could.
    """

    name: str
    title: str
    weights: str
    versions: dict[str, str] = field(default_factory=dict)
    load_seconds: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    failure: str = ""

    def of(self, workload: str) -> list[Sample]:
        """Return the samples of one workload."""
        return [sample for sample in self.samples if sample.workload == workload]


@dataclass(frozen=True, slots=True)
class Rate:
    """Output tokens per second over several samples."""

    median: float
    lowest: float
    highest: float

    @staticmethod
    def of(samples: Sequence[Sample]) -> "Rate | None":
        """Return the rate of samples; None if there are none."""
        rates = [sample.rate for sample in samples]
        if not rates:
            return None
        return Rate(statistics.median(rates), min(rates), max(rates))


def first_token_seconds(samples: Sequence[Sample]) -> float | None:
    """Return the median over samples that have it; None if none does."""
    known = [
        sample.first_token_seconds for sample in samples if sample.first_token_seconds is not None
    ]
    return statistics.median(known) if known else None


def ratios(
    results: Sequence[Result], ours: Sequence[Result], workload: str
) -> dict[str, dict[str, float]]:
    """Return the ratios of our median rates to each peer's.

    Args:
        results: The peers.
        ours: The baseline results.
        workload: Its name.

    Returns:
        Ratios by the peer's name and then by ours, without peers that have no samples.
    """
    table: dict[str, dict[str, float]] = {}
    for peer in results:
        theirs = Rate.of(peer.of(workload))
        for own in ours:
            rate = Rate.of(own.of(workload))
            if theirs and rate:
                table.setdefault(peer.name, {})[own.name] = rate.median / theirs.median
    return table


def agreement(results: Sequence[Result], workload: str) -> dict[str, float]:
    """Return each peer's share of first tokens that agree with the majority.

    Peers that round differently agree on most tokens; a peer that computes something else agrees on
    few.

    Args:
        results: The peers.
        workload: Its name; samples of the same round had the same prompts.

    Returns:
        Shares in 0 to 1 by the peer's name, without peers that have no samples.
    """
    votes: dict[tuple[int, int, int], Counter[int]] = {}
    first: dict[str, list[tuple[tuple[int, int, int], int]]] = {}
    for result in results:
        seen: Counter[int] = Counter()
        for sample in result.of(workload):
            repeat = seen[sample.round]
            seen[sample.round] += 1
            for number, token in enumerate(sample.first_tokens):
                key = (sample.round, repeat, number)
                votes.setdefault(key, Counter())[token] += 1
                first.setdefault(result.name, []).append((key, token))
    return {
        name: statistics.fmean(votes[key].most_common(1)[0][0] == token for key, token in tokens)
        for name, tokens in first.items()
    }
