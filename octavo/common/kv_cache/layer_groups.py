"""Layer groups: layers of a model that keep their memory in the same blocks.

Every layer that a token's K and V, or a sequence's state, must be kept for belongs to one group. A
group has its own block table for each sequence, and its own rule for which blocks can be released.
All groups take their blocks from one pool.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

ALIGNMENT = 16
"""Kernels read keys in vectors of this many, from the first visible one rounded down."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """What a sequence holds for one group of layers.

    Attributes:
        block_size: Tokens per block; of a state, the distance between the tokens after which it may
            be kept for the prefix cache. A power of two times the smallest of all groups.
        window: A token attends to this many tokens, itself included; None: to all before it.
        chunk: A token attends to those since the last multiple of this; None: to all before it.
        state_blocks: Blocks of a sequence's state, whatever its length; 0 for K and V.
    """

    block_size: int
    window: int | None = None
    chunk: int | None = None
    state_blocks: int = 0

    @property
    def bounded(self) -> bool:
        """Whether blocks can be released before their sequence ends."""
        return self.window is not None or self.chunk is not None

    def first_block(self, position: int) -> int:
        """Return the first logical block that tokens from `position` on read."""
        if self.window is not None:
            first = max(0, position - self.window + 1)
        elif self.chunk is not None:
            first = position - position % self.chunk
        else:
            return 0
        return first // ALIGNMENT * ALIGNMENT // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the logical blocks of K and V of the first `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def held(self, num_tokens: int, step_tokens: int) -> int:
        """Return the maximum blocks that a sequence of `num_tokens` tokens holds at any time.

        Args:
            num_tokens: Tokens of the sequence.
            step_tokens: Maximum tokens of it in a step.
        """
        if self.state_blocks:
            return self.state_blocks
        reach = self.window or self.chunk
        if reach is None:
            return self.blocks_for(num_tokens)
        most = self.blocks_for(reach + step_tokens + ALIGNMENT) + 1
        return min(most, self.blocks_for(num_tokens))


def blocks_held(groups: Sequence[LayerGroup], num_tokens: int, step_tokens: int) -> int:
    """Return the maximum blocks, of all groups, that a sequence holds at any time."""
    return sum(group.held(num_tokens, step_tokens) for group in groups)


@dataclass(frozen=True, slots=True)
class BlockBudget:
    """An engine's blocks, and what requests need of them.

    Attributes:
        total_blocks: Blocks on the device.
        groups: The model's layer groups.
        step_tokens: Maximum tokens that a step computes.
    """

    total_blocks: int
    groups: tuple[LayerGroup, ...]
    step_tokens: int

    @property
    def block_size(self) -> int:
        """Tokens in the smallest block."""
        return min(group.block_size for group in self.groups)

    @property
    def growth(self) -> float:
        """Blocks that each further token of a sequence takes."""
        return sum(
            1 / group.block_size
            for group in self.groups
            if not group.bounded and not group.state_blocks
        )

    def needed(self, prompt_tokens: int, output_tokens: int, outputs: int) -> int:
        """Return the maximum blocks that a request holds at any time.

        Its outputs share the prompt's full blocks, except those that can be released.

        Args:
            prompt_tokens: Tokens of the prompt.
            output_tokens: Tokens of each output that are in the cache.
            outputs: Number of outputs.
        """
        blocks = 0
        for group in self.groups:
            if group.bounded or group.state_blocks:
                blocks += outputs * group.held(prompt_tokens + output_tokens, self.step_tokens)
            else:
                shared, rest = divmod(prompt_tokens, group.block_size)
                blocks += shared + outputs * group.blocks_for(rest + output_tokens)
        return blocks

    def cached(self, num_tokens: int) -> int:
        """Return the blocks that a cached prefix of `num_tokens` tokens spares a request."""
        return sum(
            num_tokens // group.block_size
            for group in self.groups
            if not group.bounded and not group.state_blocks
        )

    def fitting_output(self, prompt_tokens: int, outputs: int, most: int) -> int:
        """Return the maximum tokens per output, up to `most`, that there are blocks for.

        The last sampled token is not in the cache. A prompt that does not fit leaves less than 1.
        """
        return bisect_right(
            range(most), self.total_blocks, key=lambda n: self.needed(prompt_tokens, n, outputs)
        )

    def capacity(self, most: int) -> int:
        """Return the maximum tokens of a sequence, up to `most`, that there are blocks for."""
        held = partial(blocks_held, self.groups, step_tokens=self.step_tokens)
        return bisect_right(range(1, most + 1), self.total_blocks, key=held)
