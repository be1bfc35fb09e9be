"""The rule of `--speculation auto`: draft where it is measured to pay.

A step of more tokens takes longer. A drafted token pays if the tokens that it yields are worth more
than the time that it adds to the step. Both are measured: how long steps of each number of tokens
take, and how often the drafts of this sequence were right.
"""

import numpy as np

from octavo.engine.speculation.history import History
from octavo.engine.speculation.method import DraftState

PRIOR = 0.6
"""Acceptance that is assumed before anything was measured."""
MIN_ALIGNED = 0.2
"""Minimum acceptance of drafts without a match for a new sequence, so that they are tried again."""
MEMORY = 0.8
"""Share of a sequence's earlier acceptance that remains after a drafted token of weight 1."""
ENGINE_MEMORY = 0.99
"""The same share for the acceptance of all sequences, which a new one begins with."""
STEP_MEMORY = 0.9
"""Share of the earlier measure of steps of one size that remains after a step."""
MIN_GAIN = 0.05
"""Minimum gain of a draft, in tokens of its sequence beyond its cost."""
LONGEST_PAUSE = 64
"""Maximum tokens between two trials of a sequence whose drafts do not pay."""
LEVELS = 32
"""Number of levels of acceptance between 0 and 1."""
MINUTE = 1e-9
"""Minimum duration of a step, in seconds."""


class StepTimes:
    """Durations of steps by their number of tokens, from those that were measured.

    Sizes are kept apart up to a factor of 2; between them, time grows evenly. A step that is larger
    than all measured ones is assumed to take as long as the largest, up to twice its size, so that
    it is tried.
    """

    def __init__(self) -> None:
        self._sizes = np.zeros(0)
        self._seconds = np.zeros(0)
        self._buckets: dict[int, tuple[float, float]] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """Record a step."""
        bucket = (tokens - 1).bit_length()
        size, before = self._buckets.get(bucket, (float(tokens), seconds))
        # One slow step, such as the first of its size, must not count for long.
        seconds = min(seconds, 2 * before)
        keep = STEP_MEMORY
        measured = keep * size + (1 - keep) * tokens, keep * before + (1 - keep) * seconds
        self._buckets[bucket] = measured
        table = np.array(sorted(self._buckets.values()))
        self._sizes = table[:, 0]
        self._seconds = np.maximum.accumulate(table[:, 1])

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Return the seconds of steps of `tokens` tokens, `[n]`; all 0 before the first measure."""
        if not len(self._sizes):
            return np.zeros(len(tokens))
        beyond = np.maximum(tokens / (2 * self._sizes[-1]), 1.0)
        seconds: np.ndarray = np.interp(tokens, self._sizes, self._seconds) * beyond
        return seconds


class DraftPolicy:
    """Decides how many tokens to draft for a sequence in a step.

    Attributes:
        acceptance: The share of drafted tokens that were right, over all sequences lately.
        aligned: The same share for drafts without a match.
    """

    def __init__(self, longest: int) -> None:
        """Begin without a measure.

        Args:
            longest: Maximum tokens of a draft.
        """
        self.acceptance = self.aligned = PRIOR
        # The tokens that drafts of 1, 2, ... tokens yield on average, for each level of acceptance.
        levels = np.arange(LEVELS + 1) / LEVELS
        self._yields = np.cumsum(levels[:, None] ** np.arange(1, longest + 1), axis=1)
        self._more = np.arange(longest + 1)
        self._times = StepTimes()
        self._decodes = 1
        self._tokens = 1  # of the step, with drafts so far
        self._best: list[int] = []  # length that pays most, by level of acceptance; 0 if none does

    def begin(self, history: History) -> DraftState:
        """Return the draft state of a new sequence."""
        return DraftState(history, self.acceptance, max(self.aligned, MIN_ALIGNED))

    def begin_step(self, decodes: int) -> bool:
        """Begin a step of `decodes` decoding sequences; return whether any draft can pay."""
        self._decodes, self._tokens = decodes, decodes
        self._choose_lengths()
        return self._best[-1] > 0

    def _choose_lengths(self) -> None:
        """Find the length of a further draft that pays most, for each level of acceptance."""
        seconds = self._times(self._tokens + self._more)
        worth = max(seconds[0], MINUTE) / self._decodes  # of a token of one sequence, in seconds
        gains = self._yields - (seconds[1:] - seconds[0]) / worth
        self._best = np.where(gains.max(1) >= MIN_GAIN, gains.argmax(1) + 1, 0).tolist()

    def length(self, state: DraftState) -> int:
        """Return how many tokens to draft for a sequence now."""
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
        """Return how many tokens to draft for a sequence now without a match."""
        return self._best[int(state.aligned * LEVELS)]

    def drafted(self, count: int) -> None:
        """Record a draft in this step: further drafts cost more."""
        self._tokens += count
        self._choose_lengths()

    def observe_draft(self, state: DraftState, drafted: int, accepted: int) -> None:
        """Record how many drafted tokens of a sequence were right.

        Tokens behind the first wrong one are not counted.
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
    """Pause a sequence's drafting for a while, twice as long as the last time."""
    state.pause = state.last_pause = min(max(2, 2 * state.last_pause), LONGEST_PAUSE)
