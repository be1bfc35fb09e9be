"""What attention over a paged cache must know about a batch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which tokens of a flat batch belong to which sequence and where their K/V lie.

    The tensors are contiguous and on the same device as the cache.

    Attributes:
        query_starts: `[num_seqs + 1]` int32, rising from 0; the queries of
            sequence i are the rows `query_starts[i]:query_starts[i + 1]`.
        seq_lens: `[num_seqs]` int32; tokens in the cache once this step's are
            written (context and queries together).
        block_tables: `[num_seqs, max_blocks]` int32; the physical block of each
            logical one. Entries past a sequence's end are never followed.
        slot_mapping: `[num_tokens]` int64; `block * block_size + offset` of the
            slot each token is written to; a negative one is not written.
        max_query_len: the most queries that any one sequence has.
        max_seq_len: the greatest of `seq_lens`.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
