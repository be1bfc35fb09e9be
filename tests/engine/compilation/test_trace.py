"""A trace is right for any number of tokens and rows, or refused."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from octavo.engine.attention.operator import DryRun, attending
from octavo.engine.compilation.script import Script, UnscriptableError
from octavo.engine.compilation.trace import FOLDED_BYTES, Trace, UntraceableError, trace
from octavo.engine.models.forward import EagerForward

aten = torch.ops.aten
VOCABULARY, WIDTH = 50, 8
SIZES = [(1, 1), (2, 1), (2, 2), (33, 1), (33, 33)]
"""Tokens and rows."""


class Model(nn.Module):
    """Calls `compute` for the logits of its tokens' embeddings.

    Args:
        compute: Takes the model, embeddings `[1, tokens, WIDTH]`, positions `[1, tokens]` and rows.
        weights: Weights besides the embedding.
    """

    def __init__(self, compute, **weights):
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        self.compute = compute
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=numbers))
        for name, weight in weights.items():
            self.register_buffer(name, weight)

    def forward(self, input_ids, position_ids, use_cache, logits_to_keep):
        assert not use_cache
        embedded = nn.functional.embedding(input_ids, self.table)
        return SimpleNamespace(logits=self.compute(self, embedded, position_ids, logits_to_keep))


def traced(compute, **weights) -> Trace:
    return trace(EagerForward(Model(compute, **weights)), VOCABULARY)


def calls(of):
    return [str(node.target) for node in of.graph.nodes if node.op == "call_function"]


def inputs(tokens, rows):
    """Return inputs like the engine's: rows of one array."""
    laid = torch.stack([torch.arange(tokens) * 3 % VOCABULARY, torch.arange(tokens) + 100])
    return laid[:1], laid[1:], torch.arange(-1, rows)[1:] * 5 % tokens


def check(compute, **weights):
    """Assert that the trace computes the model's results; return the trace."""
    step = EagerForward(Model(compute, **weights))
    found = trace(step, VOCABULARY)
    module = Script(found)
    for size in SIZES:
        given = inputs(*size)
        with torch.inference_mode():
            expected = step(*given)
            for _ in range(2):  # its constants have not changed
                torch.testing.assert_close(module(*given), expected, atol=1e-5, rtol=1e-5)
    return found


def picked(x, rows):
    return x[:, rows]


def sizes(_, x, positions, rows):
    """Its sizes are linear in the number of tokens and of rows."""
    tokens = x.shape[1]
    both = torch.cat([x[:, : 2 * tokens], x, x], 1)[:, tokens : 3 * tokens - 1]
    padded = nn.functional.pad(both, (0, 0, 0, rows.shape[0]))
    return picked(padded, rows) + padded.new_full((tokens, rows.shape[0], 1), 0.5).sum()


def offsets(_, x, positions, rows):
    """Positions are in the memory of the token ids."""
    turned = positions.unsqueeze(-1).transpose(1, 2).transpose(1, 2) * 1.5
    return picked(x + turned, rows) + rows.unsqueeze(0).unsqueeze(-1)


def views(_, x, positions, rows):
    """Views of views, expanded views and views with gaps work."""
    heads = x.view(1, -1, 2, WIDTH // 2).transpose(1, 2)[..., 1:]
    first, second = heads.chunk(2, 1)
    wide = first.unsqueeze(-1).expand(-1, -1, -1, -1, 4)[:, 0]
    return picked((wide.sum(-1) + second[:, 0, :, ::1]).reshape(1, -1, WIDTH // 2 - 1), rows)


def in_place(_, x, positions, rows):
    """Other views see in-place changes through a view, before and after."""
    y = x.clone()
    before = y[..., :4] * 1
    half = y[..., :4]
    half.mul_(2).add_(1)
    y[:, :, 6] = 3.0
    after = y[..., 2:]
    y.view(-1)[::WIDTH].zero_()
    return picked(torch.cat([before, after, y], -1), rows)


def parts(_, x, positions, rows):
    """An operator may have several results."""
    greatest, index = x.max(-1, keepdim=True)
    values, indices = x.topk(2)
    return picked(torch.cat([greatest, index, values, indices, *x.split(3, -1)], -1), rows)


def indexed(model, x, positions, rows):
    """Indexing by tensors is not control flow that depends on data."""
    return picked(model.other[positions % 5] + x, rows)


def lists(_, x, positions, rows):
    """Arguments may be infinite, lists, types or None."""
    filled = x.masked_fill(x > 0, float("-inf")).clamp(min=None, max=0.5)
    return picked(filled.softmax(-1, dtype=torch.float32).to(torch.float64).mean([-1], True), rows)


@pytest.mark.parametrize("compute", [sizes, offsets, views, in_place, parts, indexed, lists])
def test_it_computes_what_the_model_does(compute):
    check(compute, other=torch.arange(5 * WIDTH).view(5, WIDTH) / 3)


def test_views_are_strides_of_their_owner():
    module = Script(check(views))
    text = "\n".join(module.lines)
    assert "as_strided" in text
    assert not any(f"aten.{name}(" in text for name in ("view", "transpose", "expand", "slice"))


@pytest.mark.parametrize("seed", range(12))
def test_operators_of_octavo_are_called_in_order(seed):
    """Operators take views; results are used within a program, after it, or not at all."""
    choices = random.Random(seed)
    kinds = [
        choices.choice(["norm", "norm", "norm", "part", "turn", "add", "change"]) for _ in range(14)
    ]
    picks = [choices.randrange(64) for _ in range(28)]

    def compute(model, x, positions, rows):
        made, left = [x], iter(picks)
        for kind in kinds:
            one, other = (made[next(left) % len(made)] for _ in range(2))
            match kind:
                case "norm":
                    made.append(torch.ops.octavo.rms_norm(one, model.scale, 1e-5, True))
                case "part":
                    made.append(torch.cat([one, other], 1)[:, one.shape[1] :])
                case "turn":
                    made.append(one.transpose(0, 1).clone().transpose(0, 1) + 1)
                case "add":
                    made.append(one + other * 0.5)
                case "change":
                    made.append(one.clone().mul_(other).add_(1))
        return picked(torch.cat(made, 1)[:, -2 * x.shape[1] :], rows)

    check(compute, scale=torch.rand(WIDTH) + 0.5)


def test_what_depends_on_weights_alone_is_computed_once():
    def compute(model, x, positions, rows):
        scale = model.scale * 2 + 1
        return picked(x * (scale.exp() + torch.arange(WIDTH)), rows)

    found = check(compute, scale=torch.rand(WIDTH))
    computed = {"aten.embedding.default", "aten.mul.Tensor", "aten.index.Tensor"}
    assert computed == {*calls(found)} - {"aten.slice.Tensor", "aten.select.int"}
    assert calls(found).count("aten.mul.Tensor") == 1


def test_large_results_are_not_kept():
    """Precomputed constants would take memory besides the weights."""
    weight = torch.rand(FOLDED_BYTES // 4 // WIDTH + 1, WIDTH)

    def compute(model, x, positions, rows):
        return picked(x + (model.weight * 2).sum(0), rows)

    found = check(compute, weight=weight)
    assert "aten.mul.Tensor" in calls(found)
    assert max(constant.nbytes for constant in found.constants.values()) <= weight.nbytes
    assert any(constant.data_ptr() == weight.data_ptr() for constant in found.constants.values())


def test_a_number_may_be_read_from_a_weight():
    def compute(model, x, positions, rows):
        return picked(x * model.scale.item(), rows)

    check(compute, scale=torch.tensor(2.5))


def test_chance_is_not_kept():
    def compute(_, x, positions, rows):
        return picked(x * 0 + torch.rand(WIDTH), rows)

    module = Script(traced(compute))
    one, other = (module(*inputs(3, 2)) for _ in range(2))
    assert not torch.equal(one, other)


def square(_, x, positions, rows):
    return x.new_zeros(1, x.shape[1] ** 2, 3)[:, rows]


def halves(_, x, positions, rows):
    return x[:, : x.shape[1] // 2]


def by_data(_, x, positions, rows):
    return picked(x, rows) if x.sum() < 1e6 else -x


def by_mask(_, x, positions, rows):
    return x[x > 0]


def found_places(_, x, positions, rows):
    return x[:, (positions > 3).nonzero()[:, 1]]


def by_number(_, x, positions, rows):
    return picked(x * x.max().item(), rows)


def branches(_, x, positions, rows):
    return picked(x.sin() if x.shape[1] > 6 else x.cos(), rows)


def arguments(_, x, positions, rows):
    return picked(x.sum((0, 1) if x.shape[1] > 6 else (1,), keepdim=True), rows * 0)


def of_float(_, x, positions, rows):
    return picked(x * (1 / x.shape[1]), rows)


def outside(_, x, positions, rows):
    return picked(x + torch.from_numpy(np.arange(x.shape[1]))[..., None], rows)


def looks(_, x, positions, rows):
    return picked(x * positions.tolist()[0][-1], rows)


def of_many(_, x, positions, rows):
    return picked(x.sin() if x.shape[1] > 1000 else x.cos(), rows)


def capped(_, x, positions, rows):
    return picked(x + x[:, :20].sum(1), rows)


def last_of_many(_, x, positions, rows):
    return picked(x + x[:, -20:].mean(1), rows)


def wide_if_many(_, x, positions, rows):
    return picked(x + x.sum(-1, keepdim=True).expand(-1, -1, 8 if x.shape[1] > 1000 else 1), rows)


def each(_, x, positions, rows):
    return picked(torch.stack(x.unbind(1), 1), rows)


def counted(_, x, positions, rows):
    counts = torch.zeros(WIDTH)
    counts.index_add_(0, positions[0] % WIDTH, torch.ones(x.shape[1]))
    return picked(x + counts, rows)


def kept(module, x, positions, rows):
    module.table.data.mul_(0.5)
    return picked(x * module.table.sum(), rows)


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (square, "a size is not linear in the number of tokens"),
        (halves, "a size is not linear"),
        (by_data, "result depends on the data"),
        (by_mask, "result depends on the data"),
        (found_places, "result depends on the data"),
        (by_number, "result depends on the data"),
        (branches, "other operators for other numbers of tokens"),
        (arguments, "other arguments for other numbers of tokens"),
        (of_float, "an argument depends on the number of tokens"),
        (outside, "computes something outside of PyTorch's operators"),
        (looks, "its Python code looks at data"),
        (of_many, "other operators for other numbers of tokens"),
        (capped, "other operators for other numbers of tokens"),
        (last_of_many, "a size is not linear"),
        (wide_if_many, "a size is not linear"),
        (each, "other numbers of tensors for other numbers of tokens"),
        (counted, "it changes .* what is made of weights alone"),
        (kept, "it changes a weight"),
    ],
)
def test_what_depends_on_more_than_numbers_of_tokens_is_refused(compute, why):
    with pytest.raises(UntraceableError, match=why):
        Script(traced(compute))


@torch.library.custom_op("octavo_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(torch.empty_like)


def test_an_operator_in_python_is_refused():
    found = traced(lambda _, x, positions, rows: picked(double(x), rows))
    with pytest.raises(UnscriptableError, match=r"octavo_test\.double\.default.* in Python only"):
        Script(found)


def test_octavos_operators_are_not_run():
    """A dry run skips Octavo's operators, whose weights are most of a model's."""
    attention = torch.ops.octavo.paged_attention

    def compute(_, x, positions, rows):
        heads = x.view(-1, 2, WIDTH // 2)
        for layer in (0, 0, 1):  # attention writes the cache: no call is dropped or merged
            attended = attention(heads, heads, heads, layer, 1.0, *[None] * 5)
        return picked(attended.reshape(x.shape), rows)

    dry = DryRun()
    with attending(dry):
        found = traced(compute)
    assert calls(found).count("octavo.paged_attention.default") == 3
    assert not dry.calls


def test_another_step_is_another_module():
    """TorchScript caches compiled code by class."""
    one, other = (
        Script(traced(lambda _, x, positions, rows, n=n: picked(x * n, rows))) for n in (2, 3)
    )
    given = inputs(3, 3)
    torch.testing.assert_close(one(*given) * 3, other(*given) * 2)
