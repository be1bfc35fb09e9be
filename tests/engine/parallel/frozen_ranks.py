"""Simulated CUDA graphs of several ranks on CPUs, which refuse graphs whose sums do not meet.

Each rank replays as in `frozen`; a sum over ranks is one of the recorded launches. Before the ranks
run a graph, they compare its number and sums: on GPUs, other sums would wait for ever.
"""

import hashlib

from octavo.engine.execution.cuda_graphs import RecordingError
from tests.engine.execution.frozen import Frozen

SUM = "octavo.sum_over_ranks.default"


class OtherSumsError(AssertionError):
    """Ranks run graphs whose sums do not meet."""


class FrozenRanks(Frozen):
    """The recorder of one rank.

    Args:
        world: The ranks.
        fails_at: Number of the graph that this rank cannot record; None: it can record all.

    Attributes:
        sums: The shapes and dtypes that each graph sums, in the order of recording.
        order: Numbers of the graphs in the order of replays.
    """

    def __init__(self, world, fails_at=None):
        super().__init__(set(), lambda _: None)
        self.sums, self.order = [], []
        self._world, self._fails_at = world, fails_at

    def record(self, work):
        number, replay = len(self.sums), super().record(work)
        sums = [
            (shape, str(dtype))
            for name, arguments in self.recordings[-1]
            if name == SUM
            for _, shape, _, dtype in (arguments[0][0],)
        ]
        self.sums.append(sums)
        self._meet("recorded", number, sums)
        if number == self._fails_at:
            raise RecordingError("it is made to fail")

        def replay_together():
            self._meet("replayed", number, sums)
            self.order.append(number)
            return replay()

        return replay_together

    def _meet(self, *what):
        digest = int(hashlib.sha256(repr(what).encode()).hexdigest()[:15], 16)
        if len({own for (own,) in self._world.tell_all(digest)}) > 1:
            raise OtherSumsError(f"this rank has {what}")
