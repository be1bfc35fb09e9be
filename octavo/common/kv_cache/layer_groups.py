"""Layer groups: layers of a model that share block tables.

Every layer that stores K and V of tokens, or a state of sequences, belongs to one group. A group
has its own block table for each sequence, and its own rule for which blocks can be released. All
groups take their blocks from one pool.
"""

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

ALIGNMENT = 16
"""Alignment of the first visible key, rounded down, as kernels read keys in vectors."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The memory of a sequence for one group of layers.

    Attributes:
        block_size: Tokens per block; for a state, the distance between tokens after which it may be
            cached for prefixes. A power of two times the smallest block size of all groups.
        window: Number of tokens to which a token attends, including itself; None: all before it.
        chunk: A token attends to tokens since the last multiple of this; None: all before it.
        state_blocks: Blocks of a sequence's state, independent of its length; 0 for K and V.
        kept: Maximum number of tokens before the next one that stay in blocks; earlier ones are
            spilled to a file. None: all stay.
        unit: Number of tokens that are spilled together, a multiple of the block size.
    """

    block_size: int
    window: int | None = None
    chunk: int | None = None
    state_blocks: int = 0
    kept: int | None = field(default=None, repr=False)  # contents of blocks do not depend on it
    unit: int = field(default=1, repr=False)

    @property
    def bounded(self) -> bool:
        """Whether tokens attend to a bounded number of tokens."""
        return self.window is not None or self.chunk is not None

    @property
    def releases(self) -> bool:
        """Whether blocks can be released before their sequence ends."""
        return self.bounded or self.kept is not None

    def first_block(self, position: int) -> int:
        """Return the first logical block that tokens from `position` on read in blocks."""
        if self.window is not None:
            first = max(0, position - self.window + 1)
        elif self.chunk is not None:
            first = position - position % self.chunk
        elif self.kept is not None:
            first = -(-max(0, position - self.kept) // self.unit) * self.unit
        else:
            return 0
        return first // ALIGNMENT * ALIGNMENT // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of logical K and V blocks of the first `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def held(self, num_tokens: int, step_tokens: int) -> int:
        """Return the maximum blocks that a sequence of `num_tokens` tokens holds at any time.

        Args:
            num_tokens: Tokens of the sequence.
            step_tokens: Maximum tokens of the sequence per step.
        """
        if self.state_blocks:
            return self.state_blocks
        reach = self.window or self.chunk
        if self.kept is not None:  # spilled blocks are held until they have been written
            reach = self.kept + step_tokens
        if reach is None:
            return self.blocks_for(num_tokens)
        most = self.blocks_for(reach + step_tokens + ALIGNMENT) + 1
        return min(most, self.blocks_for(num_tokens))


def most_kept(groups: Sequence[LayerGroup]) -> int:
    """Return the maximum tokens of a sequence of which nothing is spilled."""
    return min((group.kept for group in groups if group.kept is not None), default=sys.maxsize)


def blocks_held(groups: Sequence[LayerGroup], num_tokens: int, step_tokens: int) -> int:
    """Return the maximum blocks, summed over groups, that a sequence holds at any time."""
    return sum(group.held(num_tokens, step_tokens) for group in groups)


@dataclass(frozen=True, slots=True)
class BlockBudget:
    """An engine's number of blocks, and how many a request needs.

    Attributes:
        total_blocks: Number of blocks on the device.
        groups: The model's layer groups.
        step_tokens: Maximum tokens per step.
    """

    total_blocks: int
    groups: tuple[LayerGroup, ...]
    step_tokens: int

    @property
    def block_size(self) -> int:
        """Tokens per block, the smallest of all groups."""
        return min(group.block_size for group in self.groups)

    @property
    def growth(self) -> float:
        """Blocks per further token of a sequence."""
        return sum(
            1 / group.block_size
            for group in self.groups
            if not group.bounded and not group.state_blocks
        )

    def needed(self, prompt_tokens: int, output_tokens: int, outputs: int) -> int:
        """Return the maximum blocks that a request holds at any time.

        Its outputs share the prompt's full blocks, except those that can be released. Only one
        output of a request may be spilled, so several do not fit if they are too long.

        Args:
            prompt_tokens: Tokens of the prompt.
            output_tokens: Tokens of each output in the cache.
            outputs: Number of outputs.
        """
        blocks, num_tokens = 0, prompt_tokens + output_tokens
        if outputs > 1 and num_tokens > most_kept(self.groups):
            return self.total_blocks + 1
        for group in self.groups:
            if outputs == 1 or group.bounded or group.state_blocks:
                blocks += outputs * group.held(num_tokens, self.step_tokens)
            else:
                shared, rest = divmod(prompt_tokens, group.block_size)
                blocks += shared + outputs * group.blocks_for(rest + output_tokens)
        return blocks

    def cached(self, num_tokens: int) -> int:
        """Return the number of blocks that a cached prefix of `num_tokens` tokens saves."""
        return sum(
            num_tokens // group.block_size
            for group in self.groups
            if not group.bounded and not group.state_blocks
        )

    def fitting_output(self, prompt_tokens: int, outputs: int, most: int) -> int:
        """Return the maximum tokens per output, up to `most`, for which there are blocks.

        The last sampled token needs no cache. The result is below 1 if the prompt does not fit.
        """
        return bisect_right(
            range(most), self.total_blocks, key=lambda n: self.needed(prompt_tokens, n, outputs)
        )

    def capacity(self, most: int) -> int:
        """Return the maximum tokens of a sequence, up to `most`, for which there are blocks."""
        held = partial(blocks_held, self.groups, step_tokens=self.step_tokens)
        return bisect_right(range(1, most + 1), self.total_blocks, key=held)
