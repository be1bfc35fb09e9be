"""Graphs that run any mix of prompt chunks, decodes and drafts."""

import gc
import itertools
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from octavo.engine.attention.operator import current_step
from octavo.engine.execution.graph_sizes import (
    MAX_MIXED_ROWS,
    MIXED_STRIDE,
    GraphSize,
    graph_sizes,
    mixed_sizes,
    step_sizes,
)
from octavo.engine.execution.recorded_steps import NO_GRAPH
from octavo.engine.settings import EngineSettings
from octavo.engine.speculation.speculation import Speculation
from octavo.engine.startup.build import build
from octavo.kernels.metadata import AttentionPlan
from tests.architectures.entries import entries
from tests.architectures.serve import save
from tests.engine.execution.conftest import LONGEST
from tests.engine.execution.recording import VOCAB_SIZE, Again, AsOnAGpu, graphs_of, step_inputs
from tests.engine.oracle import Oracle
from tests.engine.random_model import TINY, save_random_model
from tests.engine.stepper import Stepper, parts_of


@pytest.mark.parametrize("num_drafted", [0, 4])
@pytest.mark.parametrize("max_tokens", [1, 2, 24, 100, 512, 8192])
@pytest.mark.parametrize("most", [1, 100, 256, 1000])
def test_sizes_are_few_and_take_all_steps_up_to_the_bound(most, max_tokens, num_drafted):
    sizes = mixed_sizes(most, max_tokens, num_drafted)
    rows = [size.rows for size in sizes]
    bound = min(max_tokens, MAX_MIXED_ROWS)
    assert len(sizes) <= 8
    assert rows == sorted(set(rows))
    assert all(b - a <= MIXED_STRIDE for a, b in itertools.pairwise([0, *rows]))
    assert all(size.mixed and size.longest == size.rows for size in sizes)
    if bound < 2:
        assert not sizes
        return
    assert rows[-1] == bound
    prompt = GraphSize(1, bound, bound, 1, 1)
    full = GraphSize(min(most, bound - 1), 2, bound, 1, min(most, bound - 1))
    for step in (prompt, full):
        assert any(size.holds(step) for size in sizes)
    assert not any(size.holds(prompt._replace(rows=bound + 1)) for size in sizes)


DRAFTED, BLOCK_SIZE, BATCHED = 4, 8, 24


def run(model, outputs=None, *, again=None):
    """Run prompts up to the maximum length, with drafts if `outputs` are given.

    Returns:
        The engine, and the tokens of each sequence.
    """
    settings = {"dtype": "float32", "num_blocks": 96, "swap_space": 0, "block_size": BLOCK_SIZE}
    settings |= {"max_num_seqs": 6, "max_num_batched_tokens": BATCHED, "max_model_len": LONGEST}
    parts = build(EngineSettings(model=str(model), compile="off", **settings))
    engine, num_drafted = Stepper(parts), 0
    if outputs is not None:
        num_drafted = DRAFTED
        parts.scheduler.speculation = Speculation(Oracle(outputs), DRAFTED)
    if again is not None:
        sizes = step_sizes(6, num_drafted, BATCHED)
        parts.executor.record_graphs(sizes, LONGEST, again.record)
    parts.executor.cache.device.fill_(torch.nan)  # unwritten memory must not be read
    lengths = 3, 40, 1, 20, 9, 63, 33, 2
    prompts = [[(7 * i + 11 * j) % 100 + 5 for j in range(n)] for i, n in enumerate(lengths)]
    groups = []
    for prompt in prompts:
        groups.append(engine.submit(prompt, LONGEST - len(prompt)))
        for _ in range(3):
            engine.step()
    groups.append(engine.submit([9, 8, 7], 3, prompt_logprobs=1))
    engine.run()
    return engine, [group.sequences[0].token_ids for group in groups]


def kinds(batch):
    """Return the kinds of work in a batch."""
    found = set()
    for each in parts_of(batch):
        several = each.end - each.start - len(each.draft) > 1
        found.add("chunk" if several else "draft" if each.draft else "decode")
    return frozenset(found)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("model", ["decided_model", "window_model"])
def test_steps_that_are_replayed_are_as_others(model, drafted, request):
    path = request.getfixturevalue(model)
    _, expected = run(path)
    again = Again()
    engine, outputs = run(path, expected if drafted else None, again=again)
    assert outputs == expected
    assert [len(output) for output in outputs] == [*[LONGEST] * 8, 6]
    assert max(batch.ends.max(initial=0) for batch in engine.batches) == 63
    batches = [batch for batch in engine.batches if batch.num_sequences]
    assert len(again.replayed) == len(batches) - 1  # except the one with prompt log-probabilities
    mixes = {frozenset({"chunk"}), frozenset({"chunk", "decode", *["draft"] * drafted})}
    assert mixes <= set(map(kinds, batches))


OTHERS = ["deepseek_v3", "qwen3_moe", "gemma3_text", "lfm2", "qwen3_next"]


@pytest.mark.parametrize(
    "name", ["falcon_h1", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_so_are_those_of_layers_with_states_experts_or_latents(name, tmp_path):
    (entry,) = (entry for entry in entries() if entry.name == name)
    save(entry, tmp_path)
    again = Again()
    _, expected = run(tmp_path)
    engine, outputs = run(tmp_path, again=again)
    assert outputs == expected
    batches = [batch for batch in engine.batches if batch.num_sequences]
    assert len(again.replayed) == len(batches) - 1


def plan(query_lens, _):
    """Plan one item per sequence."""
    decodes, chunks = np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)
    items = np.zeros((len(query_lens), 4), np.int32)
    items[:, 0] = [*decodes, *chunks]
    return AttentionPlan(torch.from_numpy(items), len(decodes), 0, 0)


def room(sequences, chunks, _):
    """Plan room for few items."""
    items = torch.zeros((sequences + chunks + 1, 4), dtype=torch.int32)
    items[:, 0] = -1 - torch.arange(len(items))
    return AttentionPlan(items, sequences, 0, 0)


SIZES = [GraphSize(2, 1, 2), GraphSize(4, 8, 8, 2, 4), GraphSize(4, 16, 16, 2, 4)]


step_graphs = partial(graphs_of, sizes=SIZES, plan=plan, room=room)


def mixed_inputs(wanted, *lengths):
    return step_inputs(*lengths, wanted=wanted, plan=plan)


def test_all_that_a_graph_reads_lives_as_long_as_it():
    gpu = AsOnAGpu()
    graphs = step_graphs(gpu.step, gpu.record)
    gc.collect()
    assert gpu.alive() == [True] * 8 * len(SIZES)
    assert [len(output) for output in gpu.outputs] == [4, 4, 2]
    assert len({output.untyped_storage().data_ptr() for output in gpu.outputs}) == 1
    del graphs
    gc.collect()
    assert not any(gpu.alive())


def test_a_graph_gets_a_step_and_one_more_sequence_of_the_rows_that_are_left():
    seen = []

    def step(_token_ids, _positions, wanted):
        (metadata,) = current_step().groups
        seen[:] = [wanted, metadata.query_starts, metadata.seq_lens, metadata.slot_mapping]
        seen.append(metadata.plan.items[:, 0])
        return wanted[:, None].expand(-1, VOCAB_SIZE)

    def given(wanted, *lengths):
        rows = sum(count for count, _ in lengths)
        assert graphs.run(mixed_inputs(wanted, *lengths))[:, 0].tolist() == wanted
        all_wanted, starts, seq_lens, slots, items = (tensor.tolist() for tensor in seen)
        assert slots == [*range(100, 100 + rows), *[-1] * (len(slots) - rows)]
        assert all_wanted == [*wanted, *[0] * (4 - len(wanted))]
        return starts, seq_lens, items

    graphs = step_graphs(step, Again().record)
    starts, seq_lens, items = given([0, 1, 15], (1, 30), (1, 20), (12, 12), (2, 9))
    assert (starts, seq_lens) == ([0, 1, 2, 14, 16, 16], [30, 20, 12, 9, 0])
    assert items == [0, 1, -1, -2, 2, 3, -5]  # decodes, then chunks, each before idle items
    starts, seq_lens, items = given([0, 1, 4], (1, 31), (1, 21), (3, 15))
    assert (starts, seq_lens) == ([0, 1, 2, 5, 5, 8], [31, 21, 15, 0, 0])
    assert items == [0, 1, -1, -2, 2, -5, -6]
    assert given([0], (7, 20)) == (
        [0, 7, 7, 7, 7, 8],
        [20, 0, 0, 0, 0],
        [-1, -2, -3, -4, 0, -5, -6],
    )


def test_decodes_of_which_one_is_much_longer_have_their_own_plan():
    def cut(pieces):
        return lambda *lengths: replace(plan(*lengths), most_pieces=pieces)

    def step(_token_ids, _positions, wanted):
        return torch.zeros((len(wanted), VOCAB_SIZE))

    again = Again()
    graphs = step_graphs(step, again.record, plan=cut(3))
    for pieces, rows in ((1, 2), (5, 2), (6, 4)):
        assert len(graphs.run(step_inputs((1, 5), (1, 60), plan=cut(pieces)))) == 2
        assert again.replayed.pop() == rows
    only_decodes = graphs_of(step, again.record, sizes=SIZES[:1], plan=cut(3))
    assert only_decodes.run(step_inputs((1, 5), (1, 60), plan=cut(6))) is not None


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(mixed_inputs([16], (1, 5), (16, 16)), id="too many rows"),
        pytest.param(mixed_inputs([0], *[(2, 9)] * 3), id="too many chunks"),
        pytest.param(mixed_inputs([0], *[(1, 9)] * 5), id="too many sequences"),
        pytest.param(mixed_inputs([0, 1, 2, 3, 4], (1, 5), (9, 9)), id="too many logits"),
    ],
)
def test_other_steps_are_not_replayed(inputs):
    gpu = AsOnAGpu()
    assert step_graphs(gpu.step, gpu.record).run(inputs) is None


class Launches(TorchDispatchMode):
    """Counts operations except views: each launches at least one kernel."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aliases = [each.alias_info for each in func._schema.returns]
        if not any(alias is not None and not alias.is_write for alias in aliases):
            self.found[str(func)] += 1
        return func(*args, **kwargs or {})


def count_launches(path):
    """Count the launches of an eager step of decodes and a chunk, and of its replay."""
    settings = {"num_blocks": 32, "swap_space": 0, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    parts = build(EngineSettings(model=str(path), dtype="float32", compile="off", **settings))
    executor, engine, gpu = parts.executor, Stepper(parts), AsOnAGpu()
    executor.record_graphs(step_sizes(4, 0, 16), 64, gpu.record)
    forward, counts = executor._forward, []

    def count(inputs):
        with Launches() as replay:
            forward(inputs)
        with Launches() as eager:
            logits = forward(replace(inputs, graph=NO_GRAPH))
        if inputs.num_chunks and len(inputs.groups[0].seq_lens) > 1:
            counts.append((eager.found.total(), replay.found.total()))
        return logits

    executor._forward = count
    for prompt in ([5] * 3, [7] * 30):
        engine.submit(prompt, 8)
        engine.step()
    engine.run()
    return counts[0]


def test_a_replay_launches_as_little_however_many_layers_there_are(tmp_path):
    counts = []
    for layers in (2, 4):
        path = tmp_path / str(layers)
        changes = {"num_hidden_layers": layers, "max_position_embeddings": 64, "eos_token_id": 2}
        save_random_model(LlamaConfig(**TINY | changes), path, std=0.15)
        counts.append(count_launches(path))
    (eager, replay), (eager_of_more, replay_of_more) = counts
    per_layer = (eager_of_more - eager) / 2
    print(f"launches: {eager} eager, {per_layer} more a layer; {replay} for a replay")
    assert per_layer >= 10
    assert replay == replay_of_more <= 12


def test_mixed_graphs_are_measured_by_the_largest(tiny_model):
    again, used, own, shared = Again(), [0], 2, 500

    def record(work):
        again.record(work)
        used[0] += own + shared * (len(again.recorded) == 1)
        return lambda: None

    parts = build(EngineSettings(model=str(tiny_model), num_blocks=8, swap_space=0))
    sizes = step_sizes(100, 0, 8192)
    taken = parts.executor.measure_graphs(sizes, 128, record, lambda: 10_000 - used[0])
    assert again.recorded == [100, 100, 2]  # rows of logits: mixed, decodes, the smallest
    assert taken == shared + own * (len(graph_sizes(100)) + len(mixed_sizes(100, 8192)))
