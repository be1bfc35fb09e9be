"""Request traces: lengths like two data sets', arrivals by a Poisson process.

Lengths are log-normal, each fitted so that its mean, truncated, is the one that
the paper gives (section 6.1, figure 11): ShareGPT 161 tokens in and 338 out,
Alpaca 19 in and 58 out. The paper gives histograms and no variances; the sigmas
are ours: wide for what people type or paste (1.4) and for answers (1.0 and
0.9), narrow for Alpaca's one-line instructions (0.4). Prompt and output are cut
off at 1024 tokens each, so a request never has more than 2048, the model's
limit.

The translation workload has the paper's prefixes (section 6.4): one example of
80 tokens, or five of 341. The paper does not give the sentences' lengths; 30
tokens in and 35 out, with sigma 0.5, stand for news sentences of 20 to 25 words.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

MAX_LENGTH = 1024
"""Most tokens of a prompt, and of an output."""

DECK = 100
"""Requests among which the lengths are spread evenly over their distribution."""

VOCABULARY = 50272  # OPT's

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution, cut off at MAX_LENGTH.

    Attributes:
        mean: of what is left after the cut.
        sigma: standard deviation of the logarithm, before the cut.
    """

    mean: float
    sigma: float

    @property
    def location(self) -> float:
        """The mean of the logarithm, by bisection on the truncated mean."""
        low, high = 0.0, math.log(MAX_LENGTH) + 3 * self.sigma
        for _ in range(60):
            middle = (low + high) / 2
            if self._truncated_mean(middle) < self.mean:
                low = middle
            else:
                high = middle
        return low

    def _truncated_mean(self, location: float) -> float:
        cut = (math.log(MAX_LENGTH) - location) / self.sigma
        below = _NORMAL.cdf(cut - self.sigma) / _NORMAL.cdf(cut)
        return math.exp(location + self.sigma**2 / 2) * below

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Lengths of at least 1; a longer draw from the same state begins the same."""
        location = self.location
        share = _NORMAL.cdf((math.log(MAX_LENGTH) - location) / self.sigma)
        normals = [_NORMAL.inv_cdf(share * u) for u in _uniform(rng, count)]
        lengths = np.exp(location + self.sigma * np.array(normals))
        return np.clip(np.rint(lengths), 1, MAX_LENGTH).astype(np.int64)


def _uniform(rng: np.random.Generator, count: int) -> Floats:
    """Numbers in (0, 1), of which each DECK in turn has one in each DECK-th part, shuffled.

    So a trace of a few hundred requests has the distribution's mean too.
    """
    decks = [rng.permutation(DECK) + rng.uniform(1e-9, 1, DECK) for _ in range(-(-count // DECK))]
    numbers: Floats = np.concatenate(decks)[:count] / DECK
    return numbers


@dataclass(frozen=True, slots=True)
class Dataset:
    """What requests look like.

    Attributes:
        name: for people.
        prompt: tokens of a prompt, without the common prefix.
        output: tokens of an output.
        prefix: tokens at the front of every prompt that are the same in all.
        n: outputs of each request, all of the same length.
        beams: the width of each request's beam search, or 0 for none; `n` is then 1.
    """

    name: str
    prompt: Lengths
    output: Lengths
    prefix: int = 0
    n: int = 1
    beams: int = 0

    @property
    def num_outputs(self) -> int:
        """Outputs of each request."""
        return self.beams or self.n


SHAREGPT = Dataset("ShareGPT", Lengths(161, 1.4), Lengths(338, 1.0))
ALPACA = Dataset("Alpaca", Lengths(19, 0.4), Lengths(58, 0.9))
_TRANSLATION = Dataset("Translation", Lengths(30, 0.5), Lengths(35, 0.5))
ONE_SHOT = replace(_TRANSLATION, name="Translation, 1 shot", prefix=80)
FIVE_SHOT = replace(_TRANSLATION, name="Translation, 5 shots", prefix=341)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order in which they come.

    Attributes:
        dataset: what they are like.
        arrivals: seconds.
        prompts: tokens of each prompt, prefix included.
        outputs: tokens of each output.
        seed: what all that was drawn with.
    """

    dataset: Dataset
    arrivals: Floats
    prompts: Ints
    outputs: Ints
    seed: int

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt_tokens(self, index: int) -> list[int]:
        """A prompt's token ids: the prefix that all share, then random ones."""
        prefix = self.dataset.prefix
        rng = np.random.default_rng((self.seed, index))
        own = rng.integers(VOCABULARY, size=int(self.prompts[index]) - prefix)
        return [*range(prefix), *own.tolist()]


def backlog(dataset: Dataset, count: int, seed: int) -> Trace:
    """Requests that are all there at once, to keep a system full."""
    return _trace(dataset, np.zeros(count), seed)


def poisson(dataset: Dataset, rate: float, seconds: float, seed: int) -> Trace:
    """Requests that come for `seconds` seconds, `rate` a second on average.

    Traces of one seed have the same requests with the same gaps, scaled, so that
    rates differ by the rate alone.
    """
    gaps = np.random.default_rng((seed, 3)).exponential(size=int(rate * seconds * 1.5) + 20)
    arrivals = np.cumsum(gaps) / rate
    return _trace(dataset, arrivals[arrivals < seconds], seed)


def _trace(dataset: Dataset, arrivals: Floats, seed: int) -> Trace:
    prompts = dataset.prompt.draw(np.random.default_rng((seed, 1)), len(arrivals))
    outputs = dataset.output.draw(np.random.default_rng((seed, 2)), len(arrivals))
    return Trace(dataset, arrivals, prompts + dataset.prefix, outputs, seed)
