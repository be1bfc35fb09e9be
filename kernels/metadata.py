"""What attention over a paged cache must know about a batch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a GPU's programs share a batch; made by `octavo.kernels.ops.plan_attention`.

    Attributes:
        items: `[num_items, 2]` int32, contiguous; (sequence, tile of its query rows),
            those of sequences with one query first.
        num_decode_items: How many those are.
        longest_decode: Tokens of the longest sequence with one query.
        longest_chunk: Tokens of the longest sequence with several.
        splits: Into how many pieces the longest sequence's keys are cut, where that
            is not left to the kernels.
    """

    items: torch.Tensor
    num_decode_items: int
    longest_decode: int
    longest_chunk: int
    splits: int | None = None


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
        max_query_len: The most queries that any one sequence has.
        max_seq_len: The greatest of `seq_lens`.
        plan: For a GPU, which otherwise must ask for the lengths, in every layer.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    plan: AttentionPlan | None = None
