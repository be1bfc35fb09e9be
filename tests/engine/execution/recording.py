"""Shared parts of tests of recorded steps: recorders, graphs of a fake model, and inputs."""

import weakref
from unittest.mock import patch

import numpy as np
import torch

from octavo.engine.attention.operator import current_step
from octavo.engine.execution import cuda_graphs
from octavo.engine.execution.cuda_graphs import StepGraphs
from octavo.engine.execution.inputs import StepInputs
from octavo.kernels.metadata import AttentionMetadata

VOCAB_SIZE = 16


class Again:
    """A fake of a GPU's recorder: a replay runs the work again, on inputs at fixed addresses.

    Attributes:
        recorded: Rows of logits of each graph.
        replayed: Rows of logits of each replay.
    """

    def __init__(self):
        self.recorded = []
        self.replayed = []

    def record(self, work):
        self.recorded.append(len(work()))

        def replay():
            logits = work()
            self.replayed.append(len(logits))
            return logits

        return replay


class AsOnAGpu:
    """Records as CUDA does: a replay has only the graph and its output, not the work."""

    def __init__(self):
        self.storages = []
        self.outputs = []

    def step(self, token_ids, positions, rows):
        (metadata,) = current_step().groups
        read = (token_ids, positions, rows, metadata.query_starts, metadata.seq_lens)
        read += (metadata.block_tables, metadata.slot_mapping, metadata.plan.items)
        self.storages += [weakref.ref(tensor.untyped_storage()) for tensor in read]
        return torch.full((len(rows), VOCAB_SIZE), float(len(rows)))

    def alive(self):
        return [storage() is not None for storage in self.storages]

    def record(self, work):
        output = work()
        self.outputs.append(output)
        return lambda: output


class Graphs(StepGraphs):
    """Graphs that choose and replay at once."""

    def run(self, inputs):
        size = self.choose(inputs)
        return None if size is None else self.replay(size, inputs)


def graphs_of(step, record, *, sizes, plan, room=None):
    """Record steps whose attention is planned by `plan` and `room`, as on a GPU."""
    with patch.multiple(
        cuda_graphs,
        plan_attention=lambda query_lens, seq_lens, _shape: plan(query_lens, seq_lens),
        plan_room=lambda sequences, chunks, rows, _shape: room(sequences, chunks, rows),
    ):
        return Graphs(
            step,
            [],
            None,
            sizes=sizes,
            widths=[4],
            max_model_len=64,
            device=torch.device("cpu"),
            shapes=[None],
            record=record,
        )


def step_inputs(*lengths, wanted=None, plan=None):
    """Build inputs of sequences of (rows, tokens); each row's token is its index."""
    query_lens, seq_lens = np.array(lengths, np.int32).T
    rows = torch.arange(query_lens.sum())
    metadata = AttentionMetadata(
        query_starts=torch.tensor([0, *query_lens.cumsum()], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens),
        block_tables=torch.ones((len(lengths), 2), dtype=torch.int32),
        slot_mapping=100 + rows,
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        plan=None if plan is None else plan(query_lens, seq_lens),
    )
    several = int((query_lens > 1).sum())
    of_logits = rows if wanted is None else torch.tensor(wanted)
    return StepInputs(rows[None], rows[None], of_logits, [metadata], num_chunks=several)
