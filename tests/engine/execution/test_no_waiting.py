"""What a GPU's recorded step runs between kernels never waits for the GPU, nor reads the host.

Each architecture's step runs with tensors that have no values: whatever needs one raises. Kernels
only say the shape of their results here.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from transformers import AutoModelForCausalLM

from octavo.common.models.errors import ModelError
from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.execution.inputs import idle_arrays, to_inputs
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.memory.cache_tensors import layer_caches, state_caches
from octavo.engine.models import load_model
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.linear.adapted_layers import applying
from octavo.engine.models.rope import fix_rope
from tests.architectures.entries import entries
from tests.architectures.serve import save
from tests.engine.execution.frozen import HostCopyError, NoHostCopies

DEVICE, DTYPE = torch.device("cpu"), torch.bfloat16
ENTRIES = [entry for entry in entries() if entry.has_model]
NOT_RECORDED = {
    "dbrx": DynamicOutputShapeException,
    "jetmoe": DataDependentOutputException,
    "longcat_flash": DynamicOutputShapeException,
}
"""Models whose own loops over experts read on the host which are chosen: an engine that cannot
record a step launches each kernel."""


def without_values(model, mode):
    """Replace a model's tensors by some that have no values; shared ones stay shared."""
    made = {}

    def replace(tensors, wrap):
        for name, tensor in tensors.items():
            if tensor is not None:
                if id(tensor) not in made:
                    made[id(tensor)] = tensor, wrap(mode.from_tensor(tensor.detach()))
                tensors[name] = made[id(tensor)][1]

    for module in model.modules():
        replace(module._parameters, lambda tensor: nn.Parameter(tensor, requires_grad=False))
        replace(module._buffers, lambda tensor: tensor)


def run_step(entry, folder, monkeypatch):
    """Load an entry's model as for a GPU, and run two steps of it without values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # scalars of layers

    def pack(model, *_):
        load_model.hold(model)
        load_model.fuse_linears(model)
        load_model.group_experts(model)
        load_model.keep_on_device(model)
        without_values(model, mode)
        return 0.0

    monkeypatch.setattr(load_model, "_pack", pack)
    save(entry, folder)
    options = {"dtype": "bfloat16", "device": "cpu", "block_size": 16}
    try:
        loaded = load_model.load_unchecked(
            str(folder), **options, max_model_len=entry.max_model_len
        )
    except ModelError as error:
        pytest.skip(f"refused: {error}")
    layout = plan_layout(loaded.shape, 16, DTYPE, DTYPE)
    shapes = layout.attention_shapes(DTYPE, DTYPE, DEVICE)
    for query_lens in ([1, 1], [7, 3, 1]):
        with mode, torch.inference_mode():
            inputs = to_inputs(
                idle_arrays(query_lens, layout), device=DEVICE, shapes=shapes, longest=64
            )
            blocks = torch.empty((8, layout.block_elements), dtype=DTYPE)
            caches = layer_caches(blocks, layout), None, state_caches(blocks, layout, DTYPE)
            with attending(PagedStep(inputs.groups, *caches)), applying(None), NoHostCopies():
                logits = EagerForward(loaded.model)(
                    inputs.token_ids, inputs.positions, inputs.logit_rows
                )
        assert logits.shape == (len(query_lens), loaded.shape.vocab_size)


@pytest.mark.few(8)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_step_neither_waits_nor_copies(entry, tmp_path, monkeypatch):
    reads = NOT_RECORDED.get(entry.name)
    with pytest.raises(reads) if reads else nullcontext():
        run_step(entry, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["gemma3n_text", "phimoe, longrope"])
def test_code_that_would_wait_is_replaced_by_some_that_computes_the_same_bits(name, tmp_path):
    save(next(entry for entry in ENTRIES if entry.name == name), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=DTYPE)
    context = fix_rope(model, model.config.max_position_embeddings, None)
    tokens = torch.arange(context)[None]
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits
        load_model.keep_on_device(model)
        assert torch.equal(model(input_ids=tokens, use_cache=False).logits, expected)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (lambda hidden: hidden.sum().item(), DataDependentOutputException),
        (lambda hidden: hidden.cpu(), HostCopyError),
        (lambda hidden: torch.tensor([1.0], device=hidden.device), HostCopyError),
    ],
)
def test_a_step_that_does_is_found(fault, error, tmp_path, monkeypatch):
    forward = nn.Linear.forward

    def faulty(self, hidden):
        if not isinstance(hidden, nn.Parameter) and type(hidden) is not torch.Tensor:
            fault(hidden)
        return forward(self, hidden)

    entry = next(entry for entry in ENTRIES if entry.name == "llama")
    monkeypatch.setattr(nn.Linear, "forward", faulty)
    with pytest.raises(error):
        run_step(entry, tmp_path, monkeypatch)
