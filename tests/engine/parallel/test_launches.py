"""What the host does for a decode step of Llama-3-70B on one of four ranks, without values."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from octavo.engine.attention.interface import PAGED_ATTENTION
from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.execution import step_arrays
from octavo.engine.execution.graph_sizes import GraphSize
from octavo.engine.execution.inputs import idle_arrays, to_inputs
from octavo.engine.execution.rank_messages import RankStep
from octavo.engine.kv_cache import Transfers
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.memory.cache_tensors import layer_caches
from octavo.engine.models import load_model
from octavo.engine.models.checks.probe import set_attention
from octavo.engine.models.dimensions import find_dimensions
from octavo.engine.models.empty_model import make_empty, running_empty
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.sharding.keep_part import _add_up
from octavo.engine.models.sharding.plan import make_plan
from octavo.engine.parallel.messages import MessageRoom
from tests.engine.execution.frozen import NoHostCopies
from tests.engine.execution.recording import AsOnAGpu, Graphs
from tests.engine.execution.test_mixed_graphs import Launches
from tests.engine.execution.test_no_waiting import without_values

RANKS, SEQUENCES, LENGTH = 4, 64, 2048
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
SUM = "octavo.sum_over_ranks.default"


def rank_of_llama_70b(layers):
    """Return the part of Llama-3-70B that one of four ranks has, with fewer layers."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672 // RANKS,
        num_hidden_layers=layers,
        num_attention_heads=64 // RANKS,
        num_key_value_heads=8 // RANKS,
        head_dim=128,
        vocab_size=128_256,
        max_position_embeddings=8192,
    )
    model = make_empty(config, DTYPE)
    load_model.replace_attention(model)
    with running_empty():
        shape = find_dimensions(model, None)
    set_attention(model, PAGED_ATTENTION)
    world = SimpleNamespace(rank=1, size=RANKS, start_of=lambda count: count // RANKS)
    _add_up(model, make_plan(config, 1), world)
    return model, shape


def count_step(layers, monkeypatch):
    """Return the launches and sums of a step, and the launches and copies of its replay."""
    model, shape = rank_of_llama_70b(layers)
    mode, copies = FakeTensorMode(allow_non_fake_inputs=True), []
    layout = plan_layout(shape, 16, DTYPE, DTYPE)
    monkeypatch.setattr(
        step_arrays, "to_device", lambda array, _: copies.append(array) or torch.from_numpy(array)
    )
    arrays = decodes(layout)
    with mode, torch.inference_mode():
        without_values(model, mode)
        load_model.fuse_linears(model)
        load_model.keep_on_device(model)
        forward = EagerForward(model)
        inputs = to_inputs(arrays, device=CPU, shapes=[None])
        blocks = torch.empty((8, layout.block_elements), dtype=DTYPE)
        caches = layer_caches(blocks, layout)
        with attending(PagedStep(inputs.groups, caches)), NoHostCopies(), Launches() as eager:
            forward(inputs.token_ids, inputs.positions, inputs.logit_rows)
        graphs = Graphs(
            lambda *_: torch.empty(SEQUENCES, 128_256 // RANKS),
            caches,
            None,
            sizes=[GraphSize(SEQUENCES, 1, SEQUENCES)],
            widths=layout.sequence_blocks(8192),
            max_model_len=8192,
            device=CPU,
            shapes=[None],
            record=AsOnAGpu().record,
        )
        with Launches() as replay:
            graphs.run(inputs)
    arrays.to(torch.device("cuda"))
    return launches(eager), eager.found[SUM], launches(replay) + 1, len(copies)


def launches(counted):
    """Return the number of operators that launch kernels."""
    return sum(n for name, n in counted.found.items() if not name.startswith("prim."))


def decodes(layout):
    """Return a step that decodes one token of each of some long sequences."""
    arrays = idle_arrays([1] * SEQUENCES, layout)
    tables = [np.ones((SEQUENCES, LENGTH // 16), np.int32) for _ in layout.groups]
    return replace(arrays, tables=tables, rows=np.arange(SEQUENCES))


@pytest.mark.parametrize("layers", [2, pytest.param(80, marks=pytest.mark.slow)])
def test_a_replay_launches_as_little_however_many_sums_there_are(layers, monkeypatch):
    eager, sums, replayed, copies = count_step(layers, monkeypatch)
    print(
        f"{layers} layers: {eager} launches with {sums} sums; replay: {replayed}, copies: {copies}"
    )
    assert sums == 1 + 2 * layers
    assert eager > 15 * layers
    assert (replayed, copies) == (8, 1)


def test_a_steps_message_is_one_broadcast():
    layout = SimpleNamespace(groups=[SimpleNamespace(state_blocks=0, block_size=16)])
    step = RankStep(Transfers(), decodes(layout), True, graph=3, filled=True)
    message, room = step.message(), MessageRoom()
    broadcasts = [[part.nbytes for part in room.split(message)] for _ in range(3)]
    print(f"a step's message: {len(message)} bytes, in broadcasts of {broadcasts[-1]}")
    assert [len(each) for each in broadcasts] == [2, 1, 1]
    assert broadcasts[-1][0] < len(message) + 4096 + 16
