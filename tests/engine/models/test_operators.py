"""Compilers know that attention writes the cache, and keep each call."""

import pytest
import torch

from octavo.engine.attention.operator import DryRun, attending
from octavo.engine.compilation.capture import capture
from octavo.engine.compilation.fusion import fuse
from octavo.engine.compilation.trace import trace
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.load_model import load

attention = torch.ops.octavo.paged_attention


class Twice(torch.nn.Module):
    """Calls attention twice with equal arguments, and once only for its writes."""

    def forward(self, x):
        same = [attention(x, x, x, 0, 1.0, *[None] * 5) for _ in range(2)]
        attention(x, x, x, 1, 1.0, *[None] * 5)
        return sum(same)


def count(graph):
    return len(graph.find_nodes(op="call_function", target=attention.default))


def exported(step, _):
    program = capture(step, torch.device("cpu"))
    assert count(program.graph) == count(program.run_decompositions().graph)
    return program.graph


def traced(step, vocab_size):
    graph = trace(step, vocab_size).graph
    fuse(graph)
    return graph


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_no_call_is_dropped_or_merged(backend):
    x = torch.randn(4, 2, 32)
    exported = torch.export.export(Twice(), (x,), strict=False)
    exported.graph.eliminate_dead_code()
    assert count(exported.graph) == 3
    dry = DryRun()
    compiled = torch.compile(Twice(), fullgraph=True, backend=backend)
    with torch.inference_mode(), attending(dry):
        compiled(x)
    assert sorted(dry.calls) == [0, 0, 1]


@pytest.mark.parametrize("make", [exported, traced])
def test_a_model_attends_once_a_layer(tiny_model, make):
    loaded = load(str(tiny_model), dtype="bfloat16", device="cpu", block_size=16)
    graph = make(EagerForward(loaded.model), loaded.shape.vocab_size)
    graph.eliminate_dead_code()
    assert count(graph) == len(loaded.shape.layers)
