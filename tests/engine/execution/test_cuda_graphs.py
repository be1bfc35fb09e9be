"""CUDA graphs: recorded sizes, exact results with padding, and their memory."""

import contextlib
import gc
import itertools
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from octavo.engine.attention.operator import current_step
from octavo.engine.execution.cuda_graphs import cuda_recorder, graph_memory
from octavo.engine.execution.graph_sizes import MAX_ROWS, GraphSize, graph_sizes, step_sizes
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.scheduling.request import BeamSearch
from octavo.engine.settings import EngineSettings
from octavo.engine.speculation.speculation import Speculation
from octavo.engine.startup import cache_plan, capacity
from octavo.engine.startup import record as recording_startup
from octavo.engine.startup.build import build
from octavo.kernels.metadata import AttentionPlan
from tests.engine.execution.conftest import LONGEST
from tests.engine.execution.recording import VOCAB_SIZE, Again, AsOnAGpu, graphs_of, step_inputs
from tests.engine.oracle import Oracle
from tests.engine.stepper import Stepper, parts_of
from tests.plain import shape

SIZES = [
    GraphSize(*size)
    for size in ((2, 1, 2), (4, 1, 4), (2, 3, 6), (8, 1, 8), (4, 3, 12), (8, 3, 14))
]
MOST = [1, 3, 8, 100, 128, 256, 1000]


@pytest.mark.parametrize("most", MOST)
def test_the_ladder_ends_with_the_batch_and_wastes_little(most):
    sizes = graph_sizes(most)
    rungs = [size.sequences for size in sizes]
    assert sizes == [GraphSize(rung, 1, rung) for rung in rungs]
    assert rungs[-1] == min(max(most, 2), MAX_ROWS)
    assert rungs == sorted(set(rungs))
    for below, rung in itertools.pairwise(rungs):
        assert rung - below - 1 <= max(7, below / 4)


@pytest.mark.parametrize("most", MOST)
@pytest.mark.parametrize("num_drafted", [1, 4, 8, 64])
def test_drafts_add_few_sizes_and_none_above_the_bound(most, num_drafted):
    sizes = graph_sizes(most, num_drafted)
    assert [size for size in sizes if size.longest == 1] == graph_sizes(most)
    drafts = [size for size in sizes if size.longest > 1]
    assert {size.longest for size in drafts} == {num_drafted + 1}
    assert drafts[-1].sequences == min(max(most, 2), MAX_ROWS)
    for size in drafts[:-1]:
        assert size.rows == size.sequences * size.longest
    assert len(drafts) <= len(graph_sizes(MAX_ROWS // 2)) + 1
    rows = [size.rows for size in sizes]
    assert rows == sorted(rows)
    assert rows[-1] <= MAX_ROWS


def run(tiny_model, record=None):
    """Decodes of different lengths: the batch shrinks from size to size."""
    settings = {"dtype": "float32", "num_blocks": 64, "swap_space": 0.01, "max_num_seqs": 6}
    stepper = Stepper(build(EngineSettings(model=str(tiny_model), **settings)))
    if record:
        stepper.parts.executor.record_graphs(step_sizes(6), 128, record)
    prompts = [[7, 8, 9], list(range(3, 40)), [5], [11] * 20, [13, 14]]
    groups = [
        stepper.submit(prompt, 2 + 2 * i, eos=[2], min_tokens=2 + 2 * i)
        for i, prompt in enumerate(prompts)
    ]
    groups.append(stepper.submit([9, 8, 7], 3, prompt_logprobs=1))
    stepper.run()
    return [group.sequences[0].token_ids for group in groups]


def test_decodes_that_are_replayed_are_as_others(tiny_model):
    again = Again()
    assert run(tiny_model, again.record) == run(tiny_model)
    assert set(again.replayed) == {2, 4, 6}


def test_beams_and_what_is_sampled_beside_them_get_their_own_logits(tiny_model):
    def run(record=None):
        settings = {"dtype": "float32", "compile": "off", "num_blocks": 64, "swap_space": 0}
        stepper = Stepper(build(EngineSettings(model=str(tiny_model), max_num_seqs=6, **settings)))
        if record is not None:
            stepper.parts.executor.record_graphs(step_sizes(6), 128, record)
        groups = [
            stepper.submit([5, 6, 7], 8, beam=BeamSearch(2)),
            stepper.submit(range(9, 20), 8, logprobs=1),
            stepper.submit([11] * 20, 8),
        ]
        stepper.run()
        return [each.token_ids for group in groups for each in group.sequences]

    again = Again()
    assert run(again.record) == run()
    assert again.replayed.count(4) > 5


DRAFTED, BLOCK_SIZE = 4, 8
ROWS = DRAFTED + 1


def run_to_the_end(model, outputs=None):
    """Run prompts up to the maximum length, with drafts if `outputs` are given.

    Returns:
        The engine, the tokens of each sequence, and the rows of the graphs that were replayed.
    """
    settings = {"dtype": "float32", "num_blocks": 64, "swap_space": 0, "block_size": BLOCK_SIZE}
    parts = build(EngineSettings(model=str(model), compile="off", max_num_seqs=6, **settings))
    engine, again = Stepper(parts), Again()
    if outputs is not None:
        parts.scheduler.speculation = Speculation(Oracle(outputs), DRAFTED)
        parts.executor.record_graphs(step_sizes(6, DRAFTED), LONGEST, again.record)
    parts.executor.cache.device.fill_(torch.nan)  # unwritten memory must not be read
    lengths = 3, 40, 1, 20, 9
    prompts = [[(7 * i + 11 * j) % 400 + 5 for j in range(n)] for i, n in enumerate(lengths)]
    groups = [engine.submit(prompt, LONGEST - len(prompt)) for prompt in prompts]
    groups.append(engine.submit([9, 8, 7], 3, prompt_logprobs=1))
    for _ in range(4):
        engine.step()
    # These prompts are as short as a draft, but need only the logits of their last rows.
    groups += [engine.submit(range(100, 103 + i), 4, prompt_logprobs=[None, 1][i]) for i in (0, 1)]
    engine.run()
    return engine, [group.sequences[0].token_ids for group in groups], again.replayed


@pytest.mark.parametrize("model", ["decided_model", "window_model"])
def test_drafts_that_are_verified_by_a_replay_are_as_others(model, request):
    path = request.getfixturevalue(model)
    _, expected, _ = run_to_the_end(path)
    engine, outputs, replayed = run_to_the_end(path, expected)
    assert outputs == expected
    assert [len(output) for output in outputs] == [*[LONGEST] * 5, 6, 7, 8]
    verified = [
        batch
        for batch in engine.batches
        if batch.num_drafted and all(s.end - s.start == len(s.draft) + 1 for s in parts_of(batch))
    ]
    drafts = {len(scheduled.draft) for batch in verified for scheduled in parts_of(batch)}
    assert drafts == set(range(ROWS))
    assert max(batch.ends.max() for batch in verified) == LONGEST - 1
    counts = [batch.num_sequences for batch in verified]
    rooms = [next(size for size in (2, 4, 6) if size >= count) * ROWS for count in counts]
    assert [rows for rows in replayed if rows > 6] == rooms
    assert set(rooms) == {2 * ROWS, 4 * ROWS, 6 * ROWS}


def plan(query_lens, _):
    items = torch.zeros((len(query_lens), 4), dtype=torch.int32)
    return AttentionPlan(items, len(query_lens), 0, 0)


decode_graphs = partial(graphs_of, sizes=SIZES, plan=plan)


def test_all_that_a_graph_reads_lives_as_long_as_it():
    gpu = AsOnAGpu()
    graphs = decode_graphs(gpu.step, gpu.record)
    gc.collect()
    assert gpu.alive() == [True] * 8 * len(SIZES)
    del graphs
    gc.collect()
    assert not any(gpu.alive())


def test_all_sizes_have_one_output():
    gpu = AsOnAGpu()
    graphs = decode_graphs(gpu.step, gpu.record)
    rows = [size.rows for size in SIZES]
    assert [output.shape for output in gpu.outputs] == [(n, VOCAB_SIZE) for n in rows[::-1]]
    storages = {output.untyped_storage().data_ptr() for output in gpu.outputs}
    assert len(storages) == 1
    assert gpu.outputs[0].untyped_storage().nbytes() == rows[-1] * VOCAB_SIZE * 4
    del graphs


def test_a_graph_gets_a_step_and_sequences_of_no_tokens():
    seen = []

    def step(token_ids, _positions, rows):
        (metadata,) = current_step().groups
        seen[:] = [metadata.query_starts, metadata.seq_lens, metadata.slot_mapping, token_ids[0]]
        return torch.arange(len(rows))[:, None].expand(-1, VOCAB_SIZE)

    def given(*lengths):
        rows = sum(count for count, _ in lengths)
        assert graphs.run(step_inputs(*lengths))[:, 0].tolist() == [*range(rows)]
        starts, seq_lens, slots, token_ids = (tensor.tolist() for tensor in seen)
        assert slots == [*range(100, 100 + rows), *[-1] * (len(slots) - rows)]
        assert token_ids[:rows] == [*range(rows)]
        return starts, seq_lens

    graphs = decode_graphs(step, Again().record)
    full = given((3, 30), (3, 20), (3, 9), (3, 3))
    assert full == ([0, 3, 6, 9, 12, 12], [30, 20, 9, 3, 0])
    assert given((2, 32), (1, 21), (3, 12)) == ([0, 2, 3, 6, 6, 12], [32, 21, 12, 0, 0])
    assert given((2, 34), (1, 22)) == ([0, 2, 3, 6], [34, 22, 0])
    few_drafts = given((1, 9), (2, 8), (1, 7), (1, 6), (3, 5))
    assert few_drafts == ([0, 1, 3, 4, 5, 8, 8, 8, 8, 14], [9, 8, 7, 6, 5, 0, 0, 0, 0])
    assert given((1, 35), (1, 23), (1, 13)) == ([0, 1, 2, 3, 4], [35, 23, 13, 0])


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(step_inputs((1, 5), (4, 9)), id="a draft that is longer than others may be"),
        pytest.param(step_inputs(*[(3, 9)] * 5), id="too many drafts"),
        pytest.param(step_inputs(*[(1, 9)] * 9), id="too many sequences"),
        pytest.param(
            replace(step_inputs((1, 5), (3, 3)), logit_rows=torch.tensor([0, 3])), id="a prompt"
        ),
        pytest.param(replace(step_inputs((1, 5), (3, 3)), scored={1: 1}), id="a scored prompt"),
    ],
)
def test_other_steps_are_not_replayed(inputs):
    gpu = AsOnAGpu()
    assert decode_graphs(gpu.step, gpu.record).run(inputs) is None


@pytest.fixture
def fake_cuda(monkeypatch):
    """Make the parts of CUDA that a recorder needs, except `torch.cuda.graph`."""
    for name in ("CUDAGraph", "Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("known", [True, False])
def test_pytorch_looks_for_freed_inputs_where_it_can_and_is_asked_to(monkeypatch, known):
    seen = []

    @contextlib.contextmanager
    def graph_of_2_13(cuda_graph, pool=None, stream=None, check_input_liveness=False):
        seen.append(check_input_liveness)
        yield

    @contextlib.contextmanager
    def graph_of_2_11(cuda_graph, pool=None, stream=None):
        seen.append(False)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph_of_2_13 if known else graph_of_2_11)
    for check in (False, True):
        cuda_recorder(check_inputs=check)(lambda: torch.zeros(1))
    assert seen == [False, known]


@pytest.mark.usefixtures("fake_cuda")
def test_each_recorder_has_a_stream_of_its_own(monkeypatch):
    seen = []

    @contextlib.contextmanager
    def graph(cuda_graph, pool=None, stream=None):
        seen.append((pool, stream))
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    for _ in range(2):
        record = cuda_recorder()
        for _ in range(2):
            record(lambda: torch.zeros(1))
    first, second, third, fourth = seen
    assert first == second
    assert third == fourth
    assert None not in first
    assert not set(first) & set(third)


def test_measured_graphs_are_dead_before_others_are_recorded():
    class Graphs:
        def __init__(self, record):
            record(lambda: torch.zeros(1))
            self.itself = self  # a cycle, as a model's closures may be
            left.append(weakref.ref(self))

    left = []
    graph_memory(graph_sizes(2), lambda _, record: Graphs(record), Again().record, lambda: 0)
    assert [graphs() for graphs in left] == [None]


GIB = 1 << 30
MIB = 1 << 20
LLAMA_3 = shape(32, 32, 8, 128, 128_256, 8192)


class Probe:
    """A fake executor of the startup's largest step, with 8 GiB of cache."""

    class Cache:
        device = torch.empty((), dtype=torch.uint8).expand(8 * GIB)
        layout = plan_layout(LLAMA_3, 16, torch.bfloat16, torch.bfloat16)

    cache = Cache()
    device = torch.device("cuda")

    def __init__(self, gpu):
        self.gpu = gpu

    def measure_graphs(self, sizes, max_model_len, record, free):
        assert sizes == step_sizes(256, 8, 8192)
        assert (max_model_len, record) == (8192, "records")
        return 3 * GIB if free() else 0


class Loaded:
    """A fake loaded model on a GPU of 80 GiB."""

    device = torch.device("cuda")
    shape = LLAMA_3
    cache_dtype = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 80 GiB: others use 1, weights 16, activations 2, the probe's cache 8."""

    class Properties:
        total_memory = 80 * GIB

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: ((80 - 28) * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 27 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: (16 + 2 + 8) * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(recording_startup, "cuda_recorder", lambda: "records")


def blocks(settings, draft_model=None):
    block_bytes = 2 * MIB
    plan = cache_plan.CachePlan(None, block_bytes, 256, 8192, SimpleNamespace(num_tokens=8))
    loaded = SimpleNamespace(model=Loaded, draft_model=draft_model, world=None)
    taken = cache_plan._memory_taken(Probe(gpu), loaded, settings, plan)
    return capacity.count_blocks(settings, Loaded.device, block_bytes, 0, taken=taken)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("graphs", "left"), [(True, 80 * 0.9 - 1 - 16 - 2 - 3), (False, 53)])
def test_the_cache_gets_all_but_what_steps_and_graphs_take(graphs, left):
    assert blocks(EngineSettings(model="any", cuda_graphs=graphs)) == int(left * 512)


@pytest.mark.usefixtures("gpu")
def test_a_draft_models_graphs_are_measured_too():
    settings = EngineSettings(model="any")
    drafting = SimpleNamespace(measure_graphs=lambda seqs, tokens: seqs * tokens << 10)
    assert blocks(settings) - blocks(settings, drafting) == 1024  # 2 GiB


@pytest.mark.usefixtures("gpu")
def test_nothing_is_measured_where_somebody_said_how_much(monkeypatch):
    monkeypatch.setattr(Probe, "measure_graphs", None)
    assert blocks(EngineSettings(model="any", num_blocks=7)) == 7
    assert blocks(EngineSettings(model="any", cache_memory=1)) == 512


@pytest.mark.parametrize(("num_drafted", "chosen"), [(0, [256, 2]), (8, [256, 256, 2])])
def test_graphs_are_measured_by_the_largest_and_the_smallest(tiny_model, num_drafted, chosen):
    used, sizes = [1000 * MIB], []
    own, shared = 2 * MIB, 500 * MIB

    def record(work):
        size = len(work())
        used[0] += own + (shared if size == 256 else 0)
        sizes.append(size)
        return lambda: None

    parts = build(EngineSettings(model=str(tiny_model), num_blocks=8, swap_space=0))
    recorded = step_sizes(256, num_drafted)
    taken = parts.executor.measure_graphs(recorded, 128, record, lambda: GIB - used[0])
    assert sizes == chosen
    assert taken == shared * chosen.count(256) + own * len(graph_sizes(256, num_drafted))
