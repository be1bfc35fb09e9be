"""The sizes of steps recorded as CUDA graphs."""

from operator import ge
from typing import NamedTuple

MAX_ROWS = 256
"""Maximum rows of a recorded step without chunks of prompts. With more, a large model's step takes
longer to compute than to launch."""
MAX_MIXED_ROWS = 512
"""Maximum rows of a recorded step with chunks of prompts."""
MIXED_STRIDE = 64
"""Rows between sizes of mixed steps: this gives 8 sizes, and at most 63 padding rows."""
MOST_CHUNKS = 32
"""Maximum chunks of a recorded mixed step without drafts. Room for more would add programs that are
idle in most steps."""

MOST_ADAPTERS = 8
"""Maximum adapters of a recorded step. Room for more would add programs that are idle in most
steps."""
MOST_RANK = 64
"""Maximum rank of an adapter of a recorded step; see `MOST_ADAPTERS`."""


class GraphSize(NamedTuple):
    """The room of a graph, or the needs of a step.

    Attributes:
        sequences: Maximum number of sequences of a step.
        longest: Maximum number of rows of a sequence: 1 for a decode; with drafts, its last token
            and the drafted ones.
        rows: Maximum number of rows of all sequences.
        chunks: Maximum sequences with several rows in a mixed step: chunks of prompts and drafts. A
            graph with 0 is not for mixed steps: it gives the logits of all rows.
        logits: Maximum rows of a mixed step whose logits are needed.
    """

    sequences: int
    longest: int
    rows: int
    chunks: int = 0
    logits: int = 0

    @property
    def mixed(self) -> bool:
        """Whether a graph of this size is for steps with chunks of prompts."""
        return self.chunks > 0

    def holds(self, step: "GraphSize") -> bool:
        """Return whether a step fits into a graph of this size."""
        if self.mixed:
            return all(map(ge, self, step))
        return step.logits == step.rows and all(map(ge, self[:3], step[:3]))


def step_sizes(
    max_num_seqs: int, num_drafted: int = 0, max_num_batched_tokens: int = 0
) -> list[GraphSize]:
    """Return the sizes to record; mixed steps are last, for steps that fit into no other size.

    Args:
        max_num_seqs: Maximum number of sequences in a batch.
        num_drafted: Maximum number of drafted tokens of a sequence; 0: no drafts.
        max_num_batched_tokens: Maximum number of tokens of a mixed step; 0: record none.
    """
    unmixed = graph_sizes(max_num_seqs, num_drafted)
    return unmixed + mixed_sizes(max_num_seqs, max_num_batched_tokens, num_drafted)


def graph_sizes(max_num_seqs: int, num_drafted: int = 0) -> list[GraphSize]:
    """Return the sizes to record for decodes and for steps that verify drafts, fewest rows first.

    One more size is for batches of too many sequences for all to have the longest draft.

    Args:
        max_num_seqs: Maximum number of sequences in a batch.
        num_drafted: Maximum number of drafted tokens of a sequence; 0: no drafts.
    """
    most = min(max_num_seqs, MAX_ROWS)
    sizes = [GraphSize(count, 1, count) for count in _batch_sizes(most)]
    if num_drafted:
        longest = 1 + num_drafted
        all_drafted = min(most, MAX_ROWS // longest)
        sizes += [GraphSize(n, longest, n * longest) for n in _batch_sizes(all_drafted)]
        if all_drafted < most:
            sizes.append(GraphSize(most, longest, MAX_ROWS))
    return sorted(sizes, key=lambda size: (size.rows, size.longest))


def draft_model_sizes(max_num_seqs: int, max_tokens: int) -> list[GraphSize]:
    """Return the sizes to record for a draft model.

    Before it drafts, it computes the tokens that the last step accepted, one or two for most
    sequences: so each sequence of a mixed step may be a chunk, and needs the logits of its last
    row.

    Args:
        max_num_seqs: Maximum number of sequences in a batch.
        max_tokens: Maximum number of tokens in a batch.
    """
    mixed = (
        size._replace(chunks=min(size.sequences, size.rows // 2))
        for size in mixed_sizes(max_num_seqs, max_tokens)
    )
    return [*graph_sizes(max_num_seqs), *mixed]


def _batch_sizes(most: int) -> list[int]:
    """Return the batch sizes to record, ascending: padding adds at most 7 sequences, or a quarter.

    They start at 2: a single token would not run compiled, see `compilation.jit`.
    """
    most = max(most, 2)
    sizes = [2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, MAX_ROWS + 1, 32)]
    return [*(size for size in sizes if size < most), most]


def mixed_sizes(max_num_seqs: int, max_tokens: int, num_drafted: int = 0) -> list[GraphSize]:
    """Return the sizes to record for steps with chunks of prompts, fewest rows first: at most 8.

    Args:
        max_num_seqs: Maximum number of sequences in a batch.
        max_tokens: Maximum number of tokens in a batch.
        num_drafted: Maximum number of drafted tokens of a sequence; 0: no drafts.
    """
    most = min(max_tokens, MAX_MIXED_ROWS)
    if most < 2:
        return []
    sizes = []
    for rows in (*range(MIXED_STRIDE, most, MIXED_STRIDE), most):
        sequences = min(max_num_seqs, rows)
        chunks = min(sequences, rows // 2)
        wanted = min(max_num_seqs, rows)
        if num_drafted:
            wanted = min(max(max_num_seqs, MAX_ROWS), rows)
        else:
            chunks = min(chunks, MOST_CHUNKS)
        sizes.append(GraphSize(sequences, rows, rows, chunks, wanted))
    return sizes
