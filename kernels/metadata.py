"""The description of a batch and of a layer's cache for paged attention."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes and types of layers that share a plan.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        key_dim: Elements of a key.
        value_dim: Elements of a value.
        latent: Whether there is no value cache.
        span: Positions of a window or a chunk; None: there is none.
        dtype: Dtype of queries.
        cache_dtype: Dtype of keys and values.
        device: The device of the cache.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    latent: bool = False
    span: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The division of a batch among a GPU's programs, from `octavo.kernels.ops.plan_attention`.

    For CUDA graphs, it may assume more queries and tokens than a sequence has.

    Attributes:
        items: `[num_items, 4]` int32, contiguous: (sequence, tile of its query rows, piece of the
            keys, number of pieces). Sequences with one query come first. A tile's pieces are
            adjacent.
        num_decode_items: Number of items of sequences with one query.
        num_decode_pieces: Number of decode items, the first ones, that may be pieces.
        num_chunk_pieces: Number of other items, the first ones, that may be pieces.
        splits: Number of pieces that the caller requested; None: the kernels chose.
        most_pieces: Maximum number of pieces of a tile.
    """

    items: torch.Tensor
    num_decode_items: int
    num_decode_pieces: int
    num_chunk_pieces: int
    splits: int | None = None
    most_pieces: int = 1

    def take(self, plan: "AttentionPlan", idle: torch.Tensor) -> None:
        """Replace the items by those of a batch, in a plan with room for them.

        Args:
            plan: The plan of the batch.
            idle: The items of `octavo.kernels.ops.plan_room`; they fill the remaining room after
                the batch's decodes, and after its other items.

        Raises:
            ValueError: There is no room for the batch's pieces.
        """
        needed = plan.num_decode_pieces, plan.num_chunk_pieces
        had = self.num_decode_pieces, self.num_chunk_pieces
        if needed[0] > had[0] or needed[1] > had[1]:
            raise ValueError(f"a batch has {needed} pieces, but the plan has room for {had}")
        first, count = self.num_decode_items, plan.num_decode_items
        for room, items, rest in (
            (self.items[:first], plan.items[:count], idle[:first]),
            (self.items[first:], plan.items[count:], idle[first:]),
        ):
            room[: len(items)] = items
            room[len(items) :] = rest[: len(room) - len(items)]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The sequences of a flat batch and their slots in the cache.

    The tensors are contiguous and on the same device as the cache.

    Attributes:
        query_starts: `[num_seqs + 1]` int32, rising from 0; the queries of sequence i are the rows
            `query_starts[i]:query_starts[i + 1]`.
        seq_lens: `[num_seqs]` int32; tokens in the cache, including this step's.
        block_tables: `[num_seqs, max_blocks]` int32; the physical block of each logical block.
            Kernels do not read entries past a sequence's end, nor those of blocks before the keys
            that its queries see.
        slot_mapping: `[num_tokens]` int64; each token's slot, `block * block_size + offset`;
            tokens with a negative slot are not written.
        max_query_len: Maximum queries of a sequence.
        max_seq_len: Maximum of `seq_lens`.
        plan: A GPU's plan. Without it, each layer copies the lengths to the host.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    plan: AttentionPlan | None = None


class LayerCache(NamedTuple):
    """The location of one layer's keys and values in the cache.

    Attributes:
        keys: `[num_blocks, num_kv_heads, block_size, head_dim]`.
        values: `[num_blocks, num_kv_heads, block_size, value_dim]`; None if the first elements of a
            key are its value.
        group: The layer group whose block tables list the blocks.
        written: Whether this layer writes them; else an earlier layer does.
    """

    keys: torch.Tensor
    values: torch.Tensor | None
    group: int = 0
    written: bool = True


class StateCache(NamedTuple):
    """The location of the states of one convolution or recurrence of one layer.

    Attributes:
        state: `[num_blocks, rows_per_block, *row_shape]`.
        first_row: The first row of a sequence's state in its blocks.
        group: The layer group whose tables list the blocks.
    """

    state: torch.Tensor
    first_row: int
    group: int
