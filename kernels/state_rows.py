"""The cache rows in which stateful layers keep states instead of keys and values."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateRows:
    """The states of a batch's sequences, of one convolution or recurrence of one layer.

    A sequence's state is rows in blocks of the cache. Its row r is
    `state[tables[s, (first_row + r) // rows_per_block], (first_row + r) % rows_per_block]`.
    Each call reads the rows once and writes them once, after the sequence's last token. A sequence
    whose tokens are all queries starts in this step: its state counts as zeros, so its rows may
    hold anything before.

    Attributes:
        state: `[num_blocks, rows_per_block, *row_shape]`; a view with any stride over blocks,
            contiguous inside of one.
        first_row: The first row of this state in a sequence's blocks.
        tables: `[num_seqs, blocks_of_a_state]` int32; the blocks of each sequence.
        query_starts: `[num_seqs + 1]` int32, from `AttentionMetadata`. The state of a sequence
            without tokens is not touched.
        seq_lens: `[num_seqs]` int32, from `AttentionMetadata`. A sequence of 0 tokens is padding:
            its results are zeros, and its state is not touched.
        max_query_len: Maximum tokens of a sequence, from `AttentionMetadata`.
    """

    state: torch.Tensor
    first_row: int
    tables: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int

    def check(self, rows: int, row_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raise ValueError if the tensors do not fit states of this many rows.

        Args:
            rows: The rows of a state.
            row_shape: A row's shape.
            dtype: A row's dtype.
        """
        state, tables = self.state, self.tables
        if state.shape[2:] != row_shape or state.dtype != dtype:
            raise ValueError(
                f"rows are {list(state.shape[2:])} {state.dtype}, and must be {list(row_shape)}"
                f" {dtype}"
            )
        if not state[:1].is_contiguous():
            raise ValueError(f"a block of states must be contiguous: strides are {state.stride()}")
        room = tables.shape[1] * state.shape[1]
        if not 0 <= self.first_row <= room - rows:
            raise ValueError(
                f"rows {self.first_row} to {self.first_row + rows} are not in {tables.shape[1]}"
                f" blocks of {state.shape[1]} rows"
            )
        for name in ("tables", "query_starts", "seq_lens"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
                raise ValueError(f"{name} must be contiguous int32")
