"""The rule of `--speculation auto`: draft where it measurably pays.

A step of more tokens takes longer. A drafted token pays if its expected gain exceeds the time that
it adds to the step. Both are measured: the duration of steps by number of tokens, and the share of
this sequence's drafted tokens that were right.
"""

import numpy as np

from octavo.engine.speculation.history import History
from octavo.engine.speculation.method import DraftState

PRIOR = 0.6
"""Assumed acceptance before any measurement."""
MIN_ALIGNED = 0.2
"""Minimum acceptance of drafts without a match for a new sequence, so that it tries them."""
MEMORY = 0.8
"""Decay of a sequence's acceptance per drafted token of weight 1."""
ENGINE_MEMORY = 0.99
"""The same decay for the acceptance of all sequences, from which new ones start."""
STEP_MEMORY = 0.9
"""Decay per step of the measured duration of one size of steps."""
MIN_GAIN = 0.05
"""Minimum gain of a draft beyond its cost, in tokens of its sequence."""
LONGEST_PAUSE = 64
"""Maximum tokens between two trials of a sequence whose drafts do not pay."""
LEVELS = 32
"""Number of levels of acceptance between 0 and 1."""
MINUTE = 1e-9
"""Minimum duration of a step, in seconds."""


class StepTimes:
    """Durations of steps by number of tokens, from measured steps.

    Each doubling of the size has its own measurement, with linear interpolation between. A step up
    to twice as large as the largest measured one is assumed to take as long, so that it is tried.
    """

    def __init__(self) -> None:
        self._sizes = np.zeros(0)
        self._seconds = np.zeros(0)
        self._buckets: dict[int, tuple[float, float]] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """Record a step."""
        bucket = (tokens - 1).bit_length()
        size, before = self._buckets.get(bucket, (float(tokens), seconds))
        # One slow step, such as the first of its size, must not weigh for long.
        seconds = min(seconds, 2 * before)
        keep = STEP_MEMORY
        measured = keep * size + (1 - keep) * tokens, keep * before + (1 - keep) * seconds
        self._buckets[bucket] = measured
        table = np.array(sorted(self._buckets.values()))
        self._sizes = table[:, 0]
        self._seconds = np.maximum.accumulate(table[:, 1])

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Return the seconds of steps of `tokens` tokens, `[n]`; 0 without measurements."""
        if not len(self._sizes):
            return np.zeros(len(tokens))
        beyond = np.maximum(tokens / (2 * self._sizes[-1]), 1.0)
        seconds: np.ndarray = np.interp(tokens, self._sizes, self._seconds) * beyond
        return seconds


class DraftPolicy:
    """Decides how many tokens to draft for a sequence in a step.

    Attributes:
        acceptance: The recent share of right drafted tokens over all sequences.
        aligned: The same share for drafts without a match.
    """

    def __init__(self, longest: int) -> None:
        """Begin without measurements.

        Args:
            longest: Maximum tokens of a draft.
        """
        self.acceptance = self.aligned = PRIOR
        # Expected tokens from drafts of 1, 2, ... tokens, for each level of acceptance.
        levels = np.arange(LEVELS + 1) / LEVELS
        self._yields = np.cumsum(levels[:, None] ** np.arange(1, longest + 1), axis=1)
        self._more = np.arange(longest + 1)
        self._times = StepTimes()
        self._decodes = 1
        self._tokens = 1  # tokens of the step, including drafts so far
        self._best: list[int] = []  # best length by level of acceptance; 0 if none pays

    def begin(self, history: History) -> DraftState:
        """Return the draft state of a new sequence."""
        return DraftState(history, self.acceptance, max(self.aligned, MIN_ALIGNED))

    def begin_step(self, decodes: int) -> bool:
        """Begin a step of `decodes` decoding sequences; return whether any draft can pay."""
        self._decodes, self._tokens = decodes, decodes
        self._choose_lengths()
        return self._best[-1] > 0

    def _choose_lengths(self) -> None:
        """Find the best length of a further draft, for each level of acceptance."""
        seconds = self._times(self._tokens + self._more)
        worth = max(seconds[0], MINUTE) / self._decodes  # seconds per token of one sequence
        gains = self._yields - (seconds[1:] - seconds[0]) / worth
        self._best = np.where(gains.max(1) >= MIN_GAIN, gains.argmax(1) + 1, 0).tolist()

    def length(self, state: DraftState) -> int:
        """Return the number of tokens to draft for a sequence now."""
        if state.pause > 0:
            state.pause -= 1
            return 0
        best = self._best[int(state.acceptance * LEVELS)]
        if not best and state.last_pause:
            return 1  # the pause is over: a trial
        if not best:
            _rest(state)
        return best

    def aligned_length(self, state: DraftState) -> int:
        """Return the number of tokens to draft for a sequence now without a match."""
        return self._best[int(state.aligned * LEVELS)]

    def drafted(self, count: int) -> None:
        """Record a draft in this step: further drafts cost more."""
        self._tokens += count
        self._choose_lengths()

    def observe_draft(self, state: DraftState, drafted: int, accepted: int) -> None:
        """Record the number of right drafted tokens of a sequence.

        Tokens after the first wrong one do not count.
        """
        tried = min(accepted + 1, drafted)
        keep, keep_all = MEMORY**tried, ENGINE_MEMORY**tried
        share = accepted / tried
        if state.history.alignment.drafted:
            state.aligned = keep * state.aligned + (1 - keep) * share
            self.aligned = keep_all * self.aligned + (1 - keep_all) * share
            return
        state.acceptance = keep * state.acceptance + (1 - keep) * share
        self.acceptance = keep_all * self.acceptance + (1 - keep_all) * share
        if accepted:
            state.last_pause = 0
        elif not self._best[int(state.acceptance * LEVELS)]:
            _rest(state)

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Record the duration of a step of `tokens` tokens without a prefill."""
        self._times.observe(tokens, seconds)


def _rest(state: DraftState) -> None:
    """Pause a sequence's drafting, twice as long as the last time."""
    state.pause = state.last_pause = min(max(2, 2 * state.last_pause), LONGEST_PAUSE)
