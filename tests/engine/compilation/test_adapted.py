"""Compiled and translated steps with LoRA adapters: they say what the eager step says."""

import dataclasses

import pytest
from structlog.testing import capture_logs
from transformers import LlamaConfig

from octavo.common.models.cache import cache_dir
from octavo.engine.compilation import Recipe, artifact, background, export, locate
from octavo.engine.compilation.artifact import MANIFEST, Manifest
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import build
from octavo.kernels import cpu
from tests.engine.random_model import save_random_model
from tests.engine.stepper import Stepper
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
    """A model whose fused layers have parts that begin inside of a panel."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=160,
        intermediate_size=200,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    save_random_model(config, path, std=0.1)
    return path


@pytest.fixture(scope="module")
def lora(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    paths = {
        name: save_adapter(model, folder / name, seed=seed, std=0.35, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }
    return [f"{name}={path}" for name, path in paths.items()]


@pytest.fixture
def _cache(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def _without_compiler(_cache, monkeypatch):
    for module in (artifact, background, export):
        monkeypatch.setattr(module, "has_compiler", lambda: False)


def engine(model, lora, mode, dtype, quantization):
    settings = {"num_blocks": 200, "swap_space": 0, "compile": mode, "dtype": dtype}
    settings |= {"lora": lora, "quantization": quantization, "enable_prefix_caching": False}
    return Stepper(build(EngineSettings(model=str(model), **settings)))


def translate(model, dtype, quantization, scratch):
    """Make an artifact as the process in the background does."""
    made = locate(Recipe(str(model), dtype, quantization, 16, adapters=True))
    made.path.mkdir(parents=True)
    export.compile_step(made.recipe, made.path, scratch)
    return made


def outputs(stepper):
    """Prompts of many lengths with each adapter and none: alone, and all of them together."""
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
            if token != wanted_token:  # a tie within the tolerance: what follows differs
                assert tolerance > 1e-3
                break


@pytest.mark.usefixtures("_without_compiler")
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [
        pytest.param(*way.values, marks=(*way.marks, *([pytest.mark.slow] if 0 < i < 3 else [])))
        for i, way in enumerate(WAYS)
    ],
)
def test_a_translated_step_applies_adapters(model, lora, dtype, quantization, tolerance, tmp_path):
    eager = engine(model, lora, "off", dtype, quantization)
    translate(model, dtype, quantization, tmp_path)
    loaded = engine(model, lora, "auto", dtype, quantization)
    assert loaded.parts.executor.compiled
    expected, found = outputs(eager), outputs(loaded)
    check(found, expected, tolerance)
    of_names = expected[1][-4 * len(LENGTHS) :]
    assert of_names[LENGTHS.index(17)] != pytest.approx(of_names[-2], abs=0.3)  # it does something
    # Greedy tokens alone come from the step itself.
    tokens = []
    for stepper in (loaded, eager):
        groups = [
            stepper.submit(range(9, 26), 5, adapter=stepper.adapter(n)) for n in (*ADAPTERS, None)
        ]
        stepper.run()
        tokens.append([group.sequences[0].token_ids for group in groups])
    assert tokens[0] == tokens[1] or dtype != "float32"


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [pytest.param(*way.values, marks=(*way.marks, pytest.mark.slow)) for way in WAYS],
)
def test_a_compiled_step_applies_adapters(model, lora, dtype, quantization, tolerance):
    expected = outputs(engine(model, lora, "off", dtype, quantization))
    compiled = engine(model, lora, "wait", dtype, quantization)
    assert compiled.parts.executor.compiled
    check(outputs(compiled), expected, tolerance)


def halve_scales(manifest):
    return {"trial": {name: scale / 2 for name, scale in manifest.trial.items()}}


def exchange(manifest, *ends):
    layers = dict(manifest.targets["layers"])
    first, second = (next(name for name in layers if name.endswith(end)) for end in ends)
    placements = layers[second]["placement"], layers[first]["placement"]
    for name, placement in zip((first, second), placements, strict=True):
        layers[name] = layers[name] | {"placement": placement}
    return {"targets": manifest.targets | {"layers": layers}}


def exchange_halves(manifest):
    return exchange(manifest, "gate_proj", "up_proj")


def exchange_parts(manifest):
    return exchange(manifest, "k_proj", "v_proj")


@PACKED
@pytest.mark.usefixtures("_without_compiler")
def test_a_step_that_applies_adapters_wrongly_is_not_used(model, lora, tmp_path):
    made = translate(model, "bfloat16", "none", tmp_path)
    manifest = Manifest.read(made.path / MANIFEST)
    files = {file.name: file.read_bytes() for file in made.path.iterdir()}
    for damage in (halve_scales, exchange_halves, exchange_parts):
        made.path.mkdir(exist_ok=True)
        for name, contents in files.items():
            (made.path / name).write_bytes(contents)
        dataclasses.replace(manifest, **damage(manifest)).write(made.path / MANIFEST)
        with capture_logs() as logs, pytest.MonkeyPatch.context() as patch:
            patch.setattr("octavo.engine.compilation.load_step.Compiler", lambda *_: None)
            loaded = engine(model, lora, "auto", "bfloat16", "none")
        assert not loaded.parts.executor.compiled
        errors = [entry.get("error", "") for entry in logs]
        assert any("with an adapter, self-check failed: alone" in one for one in errors), logs


@pytest.mark.usefixtures("_without_compiler")
def test_engines_without_adapters_have_a_step_of_their_own(model):
    with_adapters = locate(Recipe(str(model), "bfloat16", "none", 16, adapters=True))
    assert with_adapters.path != locate(Recipe(str(model), "bfloat16", "none", 16)).path
