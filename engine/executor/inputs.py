"""Turns a batch into the tensors that one step of the model takes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import Batch
from kernels.metadata import AttentionMetadata, AttentionPlan

Plan = Callable[[np.ndarray, np.ndarray], AttentionPlan | None]
"""Makes attention's plan of a step from its queries and tokens of each sequence."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors, all sequences laid end to end.

    Attributes:
        token_ids: `[1, num_tokens]` int64.
        positions: `[1, num_tokens]` int64.
        logit_rows: `[num_rows]` int64, the tokens whose logits are wanted; the first
            where none are.
        metadata: for attention.
        sampled: row of the logits to draw from, for slices that draw.
        scored: first row of the prompt's logits, for slices that want them.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    metadata: AttentionMetadata
    sampled: dict[int, int]
    scored: dict[int, int]


def prepare(batch: Batch, *, block_size: int, device: torch.device, plan: Plan) -> StepInputs:
    """Lays a batch out flat."""
    count = len(batch.slices)
    starts = np.zeros(count + 1, np.int32)
    tables = np.zeros((count, max(len(part.blocks) for part in batch.slices)), np.int32)
    tokens: list[int] = []
    rows: list[int] = []
    sampled: dict[int, int] = {}
    scored: dict[int, int] = {}
    for i, part in enumerate(batch.slices):
        offset = len(tokens) - part.start
        tokens += part.sequence.token_ids[part.start : part.end]
        starts[i + 1] = len(tokens)
        tables[i, : len(part.blocks)] = part.blocks
        if part.scored:
            scored[i] = len(rows)
            rows.extend(offset + position for position in part.scored)
        if part.samplers:
            sampled[i] = len(rows)
            rows.append(len(tokens) - 1)
    seq_lens = np.fromiter((part.end for part in batch.slices), np.int32, count)
    query_lens = np.diff(starts)
    positions = np.arange(len(tokens)) + np.repeat(seq_lens - starts[1:], query_lens)
    blocks = np.repeat(np.arange(count), query_lens), positions // block_size
    slots = tables[blocks].astype(np.int64) * block_size + positions % block_size
    metadata = AttentionMetadata(
        query_starts=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        plan=plan(query_lens, seq_lens),
    )
    return StepInputs(
        token_ids=torch.tensor([tokens], device=device),
        positions=torch.from_numpy(positions).unsqueeze(0).to(device),
        logit_rows=torch.tensor(rows or [0], dtype=torch.int64, device=device),
        metadata=metadata,
        sampled=sampled,
        scored=scored,
    )


def idle_inputs(
    query_lens: np.ndarray, *, longest: int, device: torch.device, plan: Plan
) -> StepInputs:
    """A step that leaves no trace: it reads the cache's first block and writes nothing.

    Args:
        query_lens: `[num_seqs]` int32; tokens of each sequence, none before them.
        longest: tokens that attention is planned for, as if sequences had so many.
        device: where the cache is.
        plan: makes attention's plan.
    """
    count = len(query_lens)
    starts = np.concatenate([[0], query_lens]).cumsum(dtype=np.int32)
    tokens = torch.zeros((1, int(starts[-1])), dtype=torch.int64, device=device)
    most = int(query_lens.max())
    metadata = AttentionMetadata(
        query_starts=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(query_lens).to(device),
        block_tables=torch.zeros((count, 1), dtype=torch.int32, device=device),
        slot_mapping=torch.full_like(tokens[0], -1),
        max_query_len=most,
        max_seq_len=most,
        plan=plan(query_lens, np.full(count, longest)),
    )
    return StepInputs(tokens, tokens, tokens[0, :count], metadata, sampled={}, scored={})
