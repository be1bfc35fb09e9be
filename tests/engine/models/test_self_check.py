"""A model that uses its mask, positions or state differently than assumed is not served.

Each model here is refused by name, or served right. With that recognition turned off, the
self-check must refuse it: it protects new kinds of models from wrong answers.
"""

import json
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from itertools import product

import pytest
import structlog.testing
import torch
from transformers import AutoModelForCausalLM

from octavo.common.models.errors import UnsupportedModelError
from octavo.common.models.rope_context import first_context
from octavo.engine.attention import state_functions
from octavo.engine.attention.interface import number_calls
from octavo.engine.models import dimensions
from octavo.engine.models import load_model as model_module
from octavo.engine.models.checks import probe as probe_module
from octavo.engine.models.checks.masks import FULL
from octavo.engine.models.checks.reference import PASSES
from octavo.engine.models.checks.routing import OperatorRouting
from octavo.engine.models.checks.self_check import SelfCheckError
from octavo.engine.models.experts import packed_experts
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.load_model import load
from octavo.kernels.cpu.experts import NotForcedError
from tests.architectures.entries import entries
from tests.architectures.serve import save

BY_NAME = {entry.name: entry for entry in entries()}


def load_tiny(path, **settings):
    return load(str(path), **({"dtype": "float32", "device": "cpu", "block_size": 8} | settings))


def ignore_masks(patch):
    patch.setattr(probe_module, "recognize", lambda *_, **__: FULL)
    patch.setattr(probe_module, "_find_mask", lambda *_: FULL)


def only_first_calls(patch):
    patch.setattr(
        probe_module,
        "number_calls",
        lambda model, calls: number_calls(model, {m: own[:1] for m, own in calls.items()}),
    )


def ignore_rope(patch):
    patch.setattr(dimensions, "fix_rope", lambda _, max_position, __: max_position)


def ignore_states(patch):
    patch.setattr(probe_module, "recording", lambda _: nullcontext())
    patch.setattr(state_functions, "any_step", lambda: None)
    ignore_convolutions(patch)


def ignore_positions(patch):
    ignore_masks(patch)
    patch.setattr(probe_module, "_count", lambda _: False)


def ignore_convolutions(patch):
    patch.setattr(probe_module, "conv1d", None)


CHUNKS = BY_NAME["llama4_text, chunks"]
ALONE, PACKED = "self-check failed: alone", "self-check failed: packed"
CHUNKED = "self-check failed: in chunks"


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "turn_off", "broken"),
    [
        pytest.param("qwen2_moe", ignore_masks, ALONE, id="window in the mask"),
        pytest.param("phimoe", ignore_masks, ALONE, id="window in the mask, rope"),
        pytest.param("gemma2", ignore_masks, ALONE, id="windows of some layers"),
        pytest.param("doge", ignore_masks, ALONE, id="computed mask"),
        pytest.param("bart", ignore_positions, PACKED, id="positions not taken"),
        pytest.param("diffllama", only_first_calls, CHUNKED, id="attention called twice"),
        pytest.param("hrm_text", only_first_calls, CHUNKED, id="layers run twice"),
        pytest.param("roberta", ignore_positions, ALONE, id="positions of its own"),
        pytest.param("falcon_h1", ignore_states, PACKED, id="recurrent state"),
        pytest.param("zaya", ignore_convolutions, PACKED, id="convolved state"),
        pytest.param("phi3, longrope", ignore_rope, CHUNKED, id="longrope"),
        pytest.param("phimoe, longrope", ignore_rope, CHUNKED, id="longrope, scale of its own"),
    ],
)
def test_without_its_recognition_a_model_is_refused(name, turn_off, broken, tmp_path, monkeypatch):
    save(BY_NAME[name], tmp_path)
    turn_off(monkeypatch)
    with pytest.raises(SelfCheckError, match=broken):
        load_tiny(tmp_path)


def test_without_its_recognition_a_mask_of_chunks_is_refused(tmp_path, monkeypatch):
    save(CHUNKS, tmp_path)
    ignore_masks(monkeypatch)
    with pytest.raises(SelfCheckError, match=ALONE):
        load_tiny(tmp_path)


def test_rope_that_neighbours_change_is_found_by_one_at_the_end_of_the_context(
    tmp_path, monkeypatch
):
    entry = BY_NAME["llama, longrope"]
    rope = entry.overrides["rope_parameters"] | {"original_max_position_embeddings": 64}
    save(replace(entry, overrides={"rope_parameters": rope}), tmp_path)
    ignore_rope(monkeypatch)
    with pytest.raises(SelfCheckError, match=PACKED):
        load_tiny(tmp_path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("doge", "computes its own mask"),
        ("deepseek_v32", "sparse"),
        ("inkling_text", "position bias"),
        ("bart", "numbers the positions of its tokens itself"),
        ("roberta", "numbers the positions of its tokens itself"),
        ("minimax", "keeps a state in its own code"),
        ("zaya", "convolves over tokens"),
    ],
)
def test_what_there_is_no_kernel_for_is_refused_by_name(name, why, tmp_path):
    save(BY_NAME[name], tmp_path)
    with pytest.raises(UnsupportedModelError, match=why):
        load_tiny(tmp_path)


def test_a_passed_check_says_how_long_it_took_and_how_near_it_was(tmp_path):
    save(BY_NAME["llama"], tmp_path)
    with structlog.testing.capture_logs() as logs:
        load_tiny(tmp_path)
    (passed,) = [entry for entry in logs if entry["event"] == "self-check passed"]
    assert passed["seconds"] > 0
    assert max(passed[name] for name in ("alone", "packed", "chunked")) < 1e-3


@pytest.mark.parametrize("beyond", [False, True])
def test_longrope_has_one_set_of_frequencies(beyond, tmp_path):
    save(BY_NAME["phi3, longrope"], tmp_path)
    original = load_tiny(tmp_path).shape.max_position
    loaded = load_tiny(tmp_path, max_model_len=original + 8 if beyond else original)
    assert loaded.shape.max_position == original + 8 * beyond
    rope = loaded.model.model.rotary_emb
    x, last = torch.zeros(1, 1, 1), loaded.shape.max_position - 1
    at_once = rope(x, torch.arange(last + 1)[None])
    for position in (0, original - 1, last):
        alone = rope(x, torch.tensor([[position]]))
        for found, expected in zip(alone, at_once, strict=True):
            assert torch.equal(found[0, 0], expected[0, position])


@pytest.mark.parametrize("name", ["phi3, longrope", "llama, longrope", "llama, dynamic rope"])
@pytest.mark.parametrize("beyond", [False, True])
def test_within_its_first_context_a_stretched_model_is_transformers(name, beyond, tmp_path):
    save(BY_NAME[name], tmp_path)
    first = first_context(json.loads((tmp_path / "config.json").read_text()))
    served = load_tiny(tmp_path, max_model_len=first + 8 if beyond else first).model
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    positions = torch.arange(first)[None]
    found, expected = (
        torch.stack(m.base_model.rotary_emb(torch.zeros(1, 1, 1), positions))
        for m in (served, model)
    )
    assert torch.equal(found, expected) == (not beyond)


def test_logits_that_are_no_numbers_are_refused(tmp_path):
    save(BY_NAME["llama"], tmp_path)
    loaded = load_tiny(tmp_path)

    def step(token_ids, positions, logit_rows):
        return EagerForward(loaded.model)(token_ids, positions, logit_rows) * torch.nan

    with pytest.raises(SelfCheckError, match=ALONE):
        loaded.check(step)


def attentions(model):
    return [layer.self_attn for layer in model.model.layers]


def mixtures(model):
    return [layer.mlp for layer in model.model.layers]


def swap_heads(own):
    heads = own.q_proj.weight.data.unflatten(0, (-1, own.head_dim))
    heads[[0, 3]] = heads[[3, 0]]


def drop_sinks(own):
    own.sinks.data.fill_(-1e4)


def scale_attention(own):
    own.scaling *= 1.1


def swap_experts(own):
    weights = own.experts.down_proj.data
    weights[[0, 1]] = weights[[1, 0]]


def permute_router(own):
    router = getattr(own, "router", None) or own.gate
    router.weight.data.copy_(router.weight.data.roll(1, 0))


def scale_experts(own):
    own.experts.down_proj.data.mul_(1.1)


def forget_expert(own):
    own.experts.down_proj.data[0].zero_()


def change_positions(patch):
    forward = EagerForward.forward

    def later(self, token_ids, positions, logit_rows):
        return forward(self, token_ids, positions + (positions >= 8), logit_rows)

    patch.setattr(EagerForward, "forward", later)


ROUTED = "self-check failed: a prompt's experts"
EITHER = f"({ROUTED}|{ALONE}).* in float32"
MUTATIONS = [
    *((attentions, swap_heads), (attentions, scale_attention), (mixtures, swap_experts)),
    *((mixtures, permute_router), (mixtures, scale_experts), (mixtures, forget_expert)),
]
FAST = {("gpt_oss", drop_sinks, "none"), ("mixtral", scale_attention, "int8")}


def refused_mutants():
    for name in ("gpt_oss", "mixtral"):
        more = [(attentions, drop_sinks)] if name == "gpt_oss" else []
        for (parts, mutate), quantization in product(MUTATIONS + more, ("none", "int8")):
            fast = (name, mutate, quantization) in FAST
            label = f"{name}, {mutate.__name__}, {quantization}"
            marks = [] if fast else [pytest.mark.slow]
            yield pytest.param(name, parts, mutate, quantization, id=label, marks=marks)


def mutate_after_reference(patch, mutate):
    """Change a model after transformers' pass has run, as a fault of Octavo would."""
    reference = model_module.reference

    def reference_of_another(model, *arguments):
        expected = reference(model, *arguments)
        mutate(model)
        return expected

    patch.setattr(model_module, "reference", reference_of_another)


@pytest.mark.parametrize(("name", "parts", "mutate", "quantization"), list(refused_mutants()))
def test_a_fault_in_one_layer_is_refused_in_fewer_bits(
    name, parts, mutate, quantization, tmp_path, monkeypatch
):
    save(BY_NAME[name], tmp_path)
    mutate_after_reference(monkeypatch, lambda model: mutate(parts(model)[1]))
    with pytest.raises(SelfCheckError, match=EITHER):
        load_tiny(tmp_path, dtype="bfloat16", quantization=quantization)


@pytest.mark.parametrize("quantization", ["none", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt_oss", "llama"))]
)
def test_other_positions_are_refused_in_fewer_bits(name, quantization, tmp_path, monkeypatch):
    save(BY_NAME[name], tmp_path)
    change_positions(monkeypatch)
    with pytest.raises(SelfCheckError, match=f"{ALONE}.* in float32"):
        load_tiny(tmp_path, dtype="bfloat16", quantization=quantization)


def test_rounding_is_that_of_several_passes(tmp_path):
    """A row that one pass rounds well by luck must not make a right model fail."""
    save(BY_NAME["llama"], tmp_path)
    expected = load_tiny(tmp_path, dtype="bfloat16").check.expected
    passes = expected.rounding.reshape(PASSES, -1)
    assert passes.shape[1] == len(expected.logits)
    assert len({tuple(errors.tolist()) for errors in passes}) == PASSES
    typical = passes.median(1).values
    assert typical.max() < 2 * typical[0]  # embeddings are rounded, not changed


def test_a_fault_of_packed_weights_is_refused(tmp_path, monkeypatch):
    """The model is right in float32, but its packed experts are not."""
    save(BY_NAME["mixtral"], tmp_path)
    pack = packed_experts.pack_experts

    def pack_swapped(model):
        pack(model)
        for own in mixtures(model):
            panels = own.experts.octavo_experts.down_panels
            panels[[0, 1]] = panels[[1, 0]]

    monkeypatch.setattr(packed_experts, "pack_experts", pack_swapped)
    with pytest.raises(SelfCheckError, match=f"{ALONE}.* in bfloat16"):
        load_tiny(tmp_path, dtype="bfloat16")


def test_a_step_that_does_not_compute_the_forced_experts_is_refused(tmp_path):
    """The kernel forces the routing of compiled steps; here, of the model's own steps."""
    save(BY_NAME["mixtral"], tmp_path)
    loaded = load_tiny(tmp_path, dtype="bfloat16")
    check = copy(loaded.check)
    check._routing = OperatorRouting()
    check(EagerForward(loaded.model))
    expected = loaded.check.expected
    more = (*expected.choices, expected.choices[0])
    check.expected = replace(expected, choices=more)
    with pytest.raises(NotForcedError, match="1 of 5 layers"):
        check(EagerForward(loaded.model))


FAMILIES = [
    *("gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3"),
    *("kimi_linear", "glm4_moe_lite", "granitemoehybrid", "granite_swa", "nemotron_h", "falcon_h1"),
    *("lfm2", "lfm2_moe", "gemma3n_text", "gemma4_text", "llama4_text, chunks"),
    *("phi3, longrope", "mixtral", "qwen3_moe", "mimo_v2_flash", "bamba", "jamba", "zamba2"),
    *("falcon", "gptj", "mpt", "bloom", "codegen", "diffllama"),
]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_pass_in_fewer_bits(name, quantization, tmp_path):
    save(BY_NAME[name], tmp_path)
    load_tiny(tmp_path, dtype="bfloat16", quantization=quantization)
