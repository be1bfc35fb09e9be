"""Traced steps with LoRA adapters give the eager step's outputs."""

import dataclasses

import pytest
from transformers import LlamaConfig

from octavo.engine.lora import adapted_model
from octavo.engine.models.checks.self_check import SelfCheckError
from octavo.kernels import cpu
from tests.engine.compilation import engines
from tests.engine.random_model import TINY, save_random_model
from tests.peft_adapters import save_adapter

PACKED = pytest.mark.skipif(cpu.linear is None, reason="this CPU has no linear kernels")
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
ADAPTERS = {
    "all": {"r": 6, "target_modules": LAYERS},
    "some": {"r": 19, "target_modules": ["v_proj", "up_proj"]},
    "wide": {"r": 64, "use_rslora": True, "target_modules": ["k_proj", "down_proj"]},
}
WAYS = [
    pytest.param("float32", "none", 1e-3),
    pytest.param("bfloat16", "none", 0.15, marks=PACKED),
    pytest.param("bfloat16", "int8", 0.15, marks=PACKED),
    pytest.param("bfloat16", "int4", 0.15, marks=PACKED),
]
LENGTHS = (1, 3, 17, 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose fused layers have parts that begin inside a panel."""
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 160, "intermediate_size": 200, "num_key_value_heads": 1}
    save_random_model(LlamaConfig(**TINY | sizes), path, std=0.1)
    return path


@pytest.fixture(scope="module")
def lora(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    paths = {
        name: save_adapter(model, folder / name, seed=seed, std=0.35, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }
    return [f"{name}={path}" for name, path in paths.items()]


def engine(model, lora, mode, dtype, quantization):
    settings = {"lora": lora, "num_blocks": 200, "enable_prefix_caching": False}
    return engines.engine(model, mode, dtype, quantization, **settings)


def outputs(stepper):
    """Prompts of many lengths with each adapter and without: alone, and all together."""
    names = [*ADAPTERS, None]
    groups = []
    for length in LENGTHS:
        groups.append(submit(stepper, range(5, 5 + length), names[len(groups) % len(names)]))
        stepper.run()
    groups += [submit(stepper, range(9, 9 + n), name) for name in names for n in LENGTHS]
    stepper.run()
    drawn = {group.request.request_id: [] for group in groups}
    for draw in stepper.sampled:
        drawn[draw.group.request.request_id].append((draw.token_id, draw.logprob.logprob))
    scored = [[one.logprob for one in group.prompt_logprobs or ()] for group in groups]
    return list(drawn.values()), scored


def submit(stepper, prompt, name):
    adapter = stepper.adapter(name)
    return stepper.submit(prompt, 5, logprobs=1, prompt_logprobs=0, adapter=adapter)


def check(found, expected, tolerance):
    for scored, wanted in zip(found[1], expected[1], strict=True):
        assert scored == pytest.approx(wanted, abs=tolerance)
    for drawn, wanted in zip(found[0], expected[0], strict=True):
        for (token, logprob), (wanted_token, wanted_logprob) in zip(drawn, wanted, strict=True):
            assert abs(logprob - wanted_logprob) < tolerance
            if token != wanted_token:  # a tie within the tolerance: later tokens differ
                assert tolerance > 1e-3
                break


@pytest.mark.parametrize(("dtype", "quantization", "tolerance"), WAYS)
def test_a_traced_step_applies_adapters(model, lora, dtype, quantization, tolerance):
    traced, eager = (engine(model, lora, mode, dtype, quantization) for mode in ("auto", "off"))
    expected, found = outputs(eager), outputs(traced)
    check(found, expected, tolerance)
    of_names = expected[1][-4 * len(LENGTHS) :]
    assert of_names[LENGTHS.index(17)] != pytest.approx(of_names[-2], abs=0.3)  # it does something
    # Greedy tokens alone come from the step itself.
    tokens = []
    for stepper in (traced, eager):
        groups = [
            stepper.submit(range(9, 26), 5, adapter=stepper.adapter(n)) for n in (*ADAPTERS, None)
        ]
        stepper.run()
        tokens.append([group.sequences[0].token_ids for group in groups])
    assert tokens[0] == tokens[1] or dtype != "float32"


def halve_scales(targets, trial):
    return targets, {name: scale / 2 for name, scale in trial.items()}


def exchange(targets, *ends):
    first, second = (next(name for name in targets.layers if name.endswith(end)) for end in ends)
    one, other = targets.layers[first], targets.layers[second]
    layers = targets.layers | {
        first: dataclasses.replace(one, placement=other.placement),
        second: dataclasses.replace(other, placement=one.placement),
    }
    return dataclasses.replace(targets, layers=layers)


def exchange_halves(targets, trial):
    return exchange(targets, "gate_proj", "up_proj"), trial


def exchange_parts(targets, trial):
    return exchange(targets, "k_proj", "v_proj"), trial


@PACKED
@pytest.mark.parametrize("damage", [halve_scales, exchange_halves, exchange_parts])
def test_a_step_that_applies_adapters_wrongly_is_refused(model, lora, damage, monkeypatch):
    given = adapted_model.adapt_loaded

    def adapt_wrongly(loaded, path, _):
        targets, scales = damage(given(loaded, path), loaded.trial.scales)
        object.__setattr__(loaded.trial, "scales", scales)
        return targets

    monkeypatch.setattr(adapted_model, "adapt_loaded", adapt_wrongly)
    with pytest.raises(SelfCheckError, match="with an adapter, self-check failed: alone"):
        engine(model, lora, "auto", "bfloat16", "none")
