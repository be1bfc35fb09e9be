"""Weights that stay in their files give the same results as in memory."""

import copy
from itertools import chain

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from octavo.engine.models import deferred, read_weights
from octavo.engine.models.checks import widened
from octavo.engine.models.deferred import DeferredTensor, held, hold, in_float32, present, take
from octavo.engine.models.empty_model import running_empty
from octavo.engine.models.read_weights import load_weights, read_config
from octavo.engine.models.shard import Shard
from tests.architectures.entries import entries
from tests.architectures.serve import save

BY_NAME = {entry.name: entry for entry in entries()}
TOKENS = torch.arange(3, 40)[None]


class Weight:
    """A deferred tensor that counts its reads."""

    def __init__(self, *shape):
        self.numbers, self.reads = torch.randn(shape), 0

    def read(self):
        self.reads += 1
        return self.numbers

    def deferred(self):
        like = torch.empty(self.numbers.shape, device="meta")
        return DeferredTensor(like, self.read, stored="own")


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t().contiguous(),
        lambda x: torch.cat([x, x[:1]]),
        lambda x: torch.stack([x, x]).flatten(0, 1),
        lambda x: x.to(torch.bfloat16).float() * 2,
        lambda x: x.chunk(2)[1],
        lambda x: x.detach(),
    ],
)
def test_what_is_made_of_one_is_read_when_it_is_used(change):
    weight = Weight(6, 4)
    made = change(weight.deferred())
    assert isinstance(made, DeferredTensor)
    assert not weight.reads
    assert torch.equal(present(made), change(weight.numbers))
    x = torch.randn(made.shape)
    assert torch.equal(made + x, change(weight.numbers) + x)


def test_a_weight_is_known_by_its_name_until_its_numbers_change():
    own = Weight(6, 4).deferred()
    parameter = nn.Parameter(own.to(torch.bfloat16), requires_grad=False)
    assert own.stored == own.detach().stored == parameter.stored == "own"
    assert own.t().stored is own[1:].stored is torch.cat([own]).stored is None


@pytest.mark.parametrize("bias", [None, torch.randn(9)])
def test_a_product_in_float32_makes_a_weight_in_parts(bias, monkeypatch):
    monkeypatch.setattr(deferred, "PART", 4 * 6)
    exact, parts = torch.randn(9, 6), []

    def rows(start, end):
        parts.append((start, end))
        return exact[start:end]

    like = torch.empty(9, 6, device="meta")
    whole = DeferredTensor(like, lambda: exact, rows=rows, exact=lambda: exact)
    own, given = in_float32(whole.to(torch.bfloat16)), torch.randn(2, 3, 6)
    with torch.inference_mode():
        found = functional.linear(given, own, bias)
        torch.testing.assert_close(found, functional.linear(given, exact, bias))
        assert parts == [(0, 4), (4, 8), (8, 9)]
        found = functional.linear(given.bfloat16(), whole.to(torch.bfloat16))
        assert torch.equal(found, functional.linear(given.bfloat16(), exact.bfloat16()))
    assert len(parts) == 3


def test_embeddings_make_only_the_rows_that_are_looked_up():
    exact, parts = torch.randn(9, 6), []

    def rows(start, end):
        parts.append((start, end))
        return exact[start:end]

    like = torch.empty(9, 6, device="meta", dtype=torch.bfloat16)
    whole = DeferredTensor(like, exact.bfloat16, rows=rows, exact=lambda: exact)
    tokens = torch.tensor([[7, 2, 7], [8, 0, 2]])
    assert torch.equal(functional.embedding(tokens, in_float32(whole)), exact[tokens])
    assert parts == [(0, 1), (2, 3), (7, 8), (8, 9)]
    assert torch.equal(functional.embedding(tokens, whole), exact.bfloat16()[tokens])


def test_what_depends_on_numbers_reads_them():
    weight = Weight(6, 4)
    assert float(weight.deferred().sum()) == float(weight.numbers.sum())
    assert torch.equal(weight.deferred().nonzero(), weight.numbers.nonzero())
    with pytest.raises(NotImplementedError, match="would change a weight"):
        weight.deferred().zero_()
    with pytest.raises(NotImplementedError, match="would change a weight"):
        torch.neg(weight.numbers, out=weight.deferred())


@pytest.mark.parametrize("inference", [False, True])
def test_other_tensors_are_changed_by_one(inference):
    weight, x = Weight(6, 4), torch.randn(6, 4)
    with torch.inference_mode(inference):
        changed = given = x * 1
        changed *= weight.deferred()
    assert changed is given
    assert torch.equal(changed, x * weight.numbers)


def test_tied_weights_stay_tied():
    weight = Weight(6, 4)
    model = nn.ModuleList([nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)])
    model[0].weight = model[1].weight = nn.Parameter(weight.deferred(), requires_grad=False)
    with held(model):
        assert type(model[0].weight) is nn.Parameter
        assert model[0].weight is model[1].weight
    assert isinstance(model[0].weight, DeferredTensor)
    copied = copy.deepcopy(model)
    assert copied[0].weight is copied[1].weight
    hold(copied)
    assert copied[0].weight is copied[1].weight
    assert torch.equal(copied[0].weight, weight.numbers)
    assert weight.reads == 2


def test_nothing_is_read_where_only_shapes_matter():
    weight = Weight(6, 4)
    layer = nn.Linear(4, 6, bias=False)
    layer.weight = nn.Parameter(weight.deferred(), requires_grad=False)
    with running_empty(), torch.no_grad():
        assert layer(torch.randn(3, 4)).shape == (3, 6)
    assert not weight.reads


@pytest.mark.parametrize("name", ["llama", "mixtral", "falcon_h1", "gpt2", "deepseek_v3"])
def test_models_compute_the_same(name, tmp_path, monkeypatch):
    monkeypatch.setattr(read_weights, "SMALL", 1)
    monkeypatch.setattr(widened, "SMALL", 0)
    save(BY_NAME[name], tmp_path)
    config = read_config(str(tmp_path), quantized=False)
    options = {"dtype": torch.bfloat16, "attn_implementation": "eager", "device_map": "cpu"}
    model = load_weights(str(tmp_path), config, None, deferred=True, **options)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    before = list(chain(model.parameters(), model.buffers()))
    assert any(isinstance(own, DeferredTensor) for own in before)
    with torch.inference_mode():
        assert torch.equal(model(TOKENS).logits, kept(TOKENS).logits)
        with widened.widened(model):
            wide = model(TOKENS).logits
        with widened.widened(kept):  # its weights are not deferred
            assert any(isinstance(own, DeferredTensor) for own in kept.parameters())
            assert torch.equal(kept(TOKENS).logits, wide)
        assert torch.allclose(wide, kept.float()(TOKENS).logits, atol=1e-5)
    after = chain(model.parameters(), model.buffers())
    assert all(own is other for own, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("shard", "reads"),
    [
        (Shard(-2, 2, 3, 3), [1] * 4),  # half of the outputs of each gate and up projection
        (Shard(-3, 1, 1, 1), [0, 1, 0, 1]),  # the second expert
        (Shard(-1, 1, 0, 2), [1] * 4),
        (Shard(-2, 1, 4, 5), [1] * 4),
    ],
)
def test_a_part_of_experts_reads_no_others_and_joins_parts(shard, reads):
    weights = [Weight(6, 4) for _ in range(4)]

    def join(tensors):
        gates, ups = torch.stack(tensors[:2]), torch.stack(tensors[2:], 0)
        return torch.cat([gates, ups], dim=1).to(torch.bfloat16)

    part = take(join([weight.deferred() for weight in weights]), shard)
    assert isinstance(part, DeferredTensor)
    assert torch.equal(present(part), shard.take(join([weight.numbers for weight in weights])))
    assert [weight.reads for weight in weights] == reads


@pytest.mark.parametrize(
    "shard", [Shard(-1, 1, 1, 2), Shard(-1, 2, 1, 1), Shard(-2, 1, 2, 2), Shard(-3, 1, 0, 1)]
)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_a_part_is_the_same_however_weights_are_joined(shard, dim):
    def stack(tensors):
        return torch.stack(tensors, dim)

    def concatenate(tensors):
        return torch.cat([each[None] for each in tensors], dim)

    for join in (stack, concatenate):
        weights = [Weight(4, 4) for _ in range(4)]
        part = take(join([weight.deferred() for weight in weights]), shard)
        assert torch.equal(present(part), shard.take(join([weight.numbers for weight in weights])))


def test_a_part_of_a_weight_keeps_its_form_and_its_rows():
    exact = torch.randn(9, 6)

    class Stored:
        def shard(self, shard):
            return shard.take(exact)

    like = torch.empty(9, 6, device="meta")
    whole = DeferredTensor(
        like,
        lambda: exact,
        stored=Stored,
        rows=lambda start, end: exact[start:end],
        exact=lambda: exact,
    )
    for shard in (Shard(-2, 1, 4, 5), Shard(-1, 1, 2, 3), Shard(-2, 3, 1, 2)):
        part, expected = take(whole.to(torch.bfloat16), shard), shard.take(exact)
        assert torch.equal(part.stored(), expected)
        assert torch.equal(in_float32(part).make(), expected)
        assert torch.equal(present(part), expected.bfloat16())
        if shard.groups == 1:
            assert torch.equal(part.rows(1, 3), expected[1:3])
        else:
            assert part.rows is None
