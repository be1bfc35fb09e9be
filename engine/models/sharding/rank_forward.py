"""A step that ranks compute in parts; rank 0 gathers its logits."""

import torch
from torch import Tensor

from octavo.engine.models.forward import EagerForward, Forward
from octavo.engine.parallel.world import World
from octavo.kernels.logits import argmax


class RankForward:
    """A step that all ranks run at once.

    Args:
        forward: Returns the logits of this rank's part of the vocabulary, `[num_rows, n]`.
        world: The ranks.
        vocab_size: Size of the vocabulary.
        everywhere: Whether to return the logits on all ranks, as the self-check needs.
    """

    def __init__(
        self, forward: Forward, world: World, vocab_size: int, *, everywhere: bool = False
    ) -> None:
        self._forward = forward
        self._world = world
        self._vocab_size = vocab_size
        self._everywhere = everywhere

    @property
    def compiled(self) -> bool:
        """Whether it is traced or compiled, not run operator by operator in Python."""
        return not isinstance(self._forward, EagerForward)

    @property
    def eager_steps(self) -> int:
        """Number of steps that ran uncompiled although it is compiled."""
        return getattr(self._forward, "eager_steps", 0)

    def __call__(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        """Return logits `[num_rows, vocab_size]`; without columns on ranks other than 0."""
        return self.logits(self.begin(token_ids, positions, logit_rows))

    def begin(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        run: Forward | None = None,
    ) -> Tensor:
        """Compute this rank's part; return its columns for `logits` or `most_likely`.

        Args:
            token_ids: See `octavo.engine.models.forward`.
            positions: See there.
            logit_rows: See there.
            run: Forward pass to run instead, for a step with images.
        """
        with self._world.step():
            return (run or self._forward)(token_ids, positions, logit_rows)

    def logits(self, columns: Tensor) -> Tensor:
        """Gather the columns of logits of all ranks; see `__call__`."""
        if self._everywhere:
            return self._world.gather_columns_everywhere(columns, self._vocab_size)
        whole = self._world.gather_columns(columns, self._vocab_size)
        return columns.new_empty((len(columns), 0)) if whole is None else whole

    def most_likely(self, columns: Tensor) -> Tensor:
        """Return each row's most likely token, the first on a tie.

        Returns:
            `[num_rows]` int64 on rank 0, where the device may still compute them; else empty.
        """
        best = argmax(columns)
        values = columns.gather(1, best[:, None]).double()
        pairs = torch.cat([values, best[:, None].double()], 1)
        gathered = self._world.gather_columns(pairs, 2 * self._world.size)
        if gathered is None:
            return best[:0]
        by_rank = gathered.view(len(columns), self._world.size, 2)
        winner = by_rank[:, :, 0].argmax(1, keepdim=True)  # the first on a tie
        tokens = by_rank[:, :, 1].gather(1, winner) + winner * self._world.part(self._vocab_size)
        return tokens[:, 0].long()
