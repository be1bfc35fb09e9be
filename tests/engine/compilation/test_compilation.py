"""The compiled step: it says what the eager one says, for any number of tokens, and is kept."""

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partialmethod

import pytest
from structlog.testing import capture_logs
from transformers import AutoTokenizer, LlamaConfig

from octavo.common.models.cache import cache_dir
from octavo.common.models.errors import ModelError
from octavo.engine.capacity import StartupError
from octavo.engine.compilation import Compiler, Recipe, locate
from octavo.engine.compilation.artifact import MANIFEST, REFERENCE, Manifest
from octavo.engine.compilation.cache_cleanup import USE, prune
from octavo.engine.models.checks.reference import Reference
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import build
from octavo.kernels.integrity import fingerprint
from tests.architectures.entries import entries
from tests.architectures.serve import save
from tests.engine.random_model import save_random_model
from tests.engine.stepper import Stepper, allow_even_tokens

LENGTHS = (1, 2, 3, 5, 17, 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model, most of whose layers fit 4 bits: the others then have 8."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=200,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    save_random_model(config, path, std=0.1)
    return path


@pytest.fixture(scope="module")
def _cache(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    (cache / "kernels").symlink_to(cache_dir() / "kernels")  # compiled when they were imported
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE_DIR", str(cache))
        yield


def engine(model, mode, dtype, quantization, kv_cache_dtype="auto"):
    settings = {"num_blocks": 64, "swap_space": 0, "compile": mode, "dtype": dtype}
    settings["kv_cache_dtype"] = kv_cache_dtype
    return Stepper(build(EngineSettings(model=str(model), quantization=quantization, **settings)))


def outputs(stepper):
    """Logits' top log-probabilities of prompts of many lengths, one at a time and together."""
    groups = []
    for length in LENGTHS:
        groups.append(stepper.submit(range(3, 3 + length), 6, logprobs=3))
        stepper.run()
    groups += [stepper.submit(range(7, 7 + length), 6, logprobs=3) for length in LENGTHS]
    stepper.run()
    drawn = {group.request.request_id: [] for group in groups}
    for draw in stepper.sampled:
        drawn[draw.group.request.request_id].append((draw.token_id, draw.logprob.logprob))
    return list(drawn.values())


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize(
    ("dtype", "quantization", "kv_cache_dtype", "tolerance"),
    [
        pytest.param("bfloat16", "none", "auto", 0.1, marks=pytest.mark.slow),
        pytest.param("float32", "none", "auto", 1e-3, marks=pytest.mark.slow),
        pytest.param("float32", "none", "fp8_e4m3", 0.1, marks=pytest.mark.slow),
        ("bfloat16", "int4", "auto", 0.1),
    ],
)
def test_compiled_is_eager_and_is_kept(model, dtype, quantization, kv_cache_dtype, tolerance):
    expected = outputs(engine(model, "off", dtype, quantization, kv_cache_dtype))
    compiled = engine(model, "wait", dtype, quantization, kv_cache_dtype)
    assert compiled.parts.executor.compiled
    found = outputs(compiled)
    check(found, expected, tolerance)
    recipe = Recipe(str(model), dtype, quantization, 16, kv_cache_dtype=kv_cache_dtype)
    manifest = locate(recipe).path / MANIFEST
    written = manifest.stat().st_mtime_ns
    again = engine(model, "auto", dtype, quantization, kv_cache_dtype)
    assert again.parts.executor.compiled
    assert outputs(again) == found
    assert manifest.stat().st_mtime_ns == written
    os.utime(manifest.with_name(USE), (0, 0))
    prune()
    assert manifest.exists(), "it is loaded"
    os.utime(manifest.with_name(USE))  # or the next compilation would remove it


@pytest.mark.slow  # compiles for minutes
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize(
    ("name", "kv_cache_dtype", "tolerance"),
    [
        *((name, "auto", 1e-3) for name in ("falcon_h1", "qwen3_next", "jamba", "deepseek_v3")),
        *((name, "fp8_e4m3", 0.1) for name in ("falcon_h1", "deepseek_v3")),
    ],
)
def test_compiled_steps_keep_states_and_latents(name, kv_cache_dtype, tolerance, tmp_path):
    """Mamba-2, the gated delta rule and Mamba, each with convolutions; latent attention."""
    save(next(entry for entry in entries() if entry.model_type == name), tmp_path)
    expected = outputs(engine(tmp_path, "off", "float32", "none", kv_cache_dtype))
    compiled = engine(tmp_path, "wait", "float32", "none", kv_cache_dtype)
    assert compiled.parts.executor.compiled
    check(outputs(compiled), expected, tolerance)


def check(found, expected, tolerance):
    for drawn, wanted in zip(found, expected, strict=True):
        for (token, logprob), (wanted_token, wanted_logprob) in zip(drawn, wanted, strict=True):
            assert abs(logprob - wanted_logprob) < tolerance
            if token != wanted_token:  # a tie within the tolerance: what follows differs
                assert tolerance > 1e-3
                break


@pytest.mark.slow  # for a compilation of over a minute: each artifact is checked as it is loaded
@pytest.mark.timeout(600)
def test_the_demo_model_knows_its_capitals_compiled(demo_model):
    """The first answer that a user sees, from real weights."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    stepper = engine("demo", "wait", "auto", "none")
    assert stepper.parts.executor.compiled
    group = stepper.submit(prompt, 8)
    stepper.run()
    assert tokenizer.decode(group.sequences[0].token_ids[len(prompt) :]).startswith(
        "The capital of France is Paris."
    )


@pytest.fixture(scope="module")
def kept(model, _cache):
    """An artifact, whichever test comes first."""
    assert engine(model, "wait", "bfloat16", "int4").parts.executor.compiled
    return model


@contextmanager
def restored_artifact(model, directory):
    """The artifact of `kept`, to be damaged within the block and restored at its end."""
    artifact = locate(Recipe(str(model), "bfloat16", "int4", 16))
    shutil.copytree(artifact.path, directory / "kept")
    try:
        yield artifact
    finally:
        shutil.rmtree(artifact.path, ignore_errors=True)
        shutil.copytree(directory / "kept", artifact.path)


def test_a_greedy_step_gives_the_logits_greatest(kept):
    """Whoever asks for no more is told tokens, which nobody sees logits of."""
    drawn = []
    for reported in ({}, {"logprobs": 0}):
        stepper = engine(kept, "auto", "bfloat16", "int4")
        groups = [stepper.submit(range(7, 7 + length), 20, **reported) for length in LENGTHS]
        masked = {group.sequences[0].id for group in groups[::2]}
        for group in groups[::2]:
            allow_even_tokens(group, 1 << 20)
        stepper.run()
        drawn.append([group.sequences[0].token_ids for group in groups])
        forced = [t.token_id for t in stepper.sampled if t.sequence.id in masked]
        assert forced
        assert not any(token_id % 2 for token_id in forced)
    assert drawn[0] == drawn[1]
    tokens = {token.token_id for token in stepper.sampled}
    assert len(tokens) > 10
    assert any(token_id % 2 for token_id in tokens)


def test_a_service_neither_traces_nor_loads_the_model(kept):
    """Nothing that could recompile is even imported."""
    program = f"""
import sys
import threading
from octavo.engine.settings import EngineSettings
from octavo.engine.models.checks.reference import Reference
from octavo.engine.capacity import StartupError
from octavo.engine.startup import build
from octavo.kernels.integrity import fingerprint
settings = dict(num_blocks=64, swap_space=0, compile="wait", dtype="bfloat16")
settings["quantization"] = "int4"
parts = build(EngineSettings(model={str(kept)!r}, **settings))
assert parts.executor.compiled
assert not {{"torch._inductor.compile_fx", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def of_kind(directory, ending):
    return next(path for path in directory.iterdir() if path.name.endswith(ending))


def replace(path, contents):
    """Puts another file in a file's place: the one that was there may be loaded."""
    path.unlink()
    path.write_bytes(contents)
    return path


def cut_in_half(directory):
    library = of_kind(directory, ".so")
    return replace(library, library.read_bytes()[: library.stat().st_size // 2])


def flip_a_weight(directory):
    library = of_kind(directory, ".so")
    contents = bytearray(library.read_bytes())
    contents[-1000] ^= 0x80
    return replace(library, contents)


def empty(directory):
    return replace(of_kind(directory, ".so"), b"")


def swap_libraries(directory):
    kernels = next((cache_dir() / "kernels").glob("*.so"))
    return replace(of_kind(directory, ".so"), kernels.read_bytes())


def lose_a_file(directory):
    file = of_kind(directory, "_metadata.json")
    file.unlink()
    return file


def open_to_others(directory):
    library = of_kind(directory, ".so")
    library.chmod(0o666)
    return library


def open_the_directory(directory):
    directory.chmod(0o777)
    return directory


def change_the_manifest(directory):
    manifest = directory / MANIFEST
    return replace(manifest, manifest.read_bytes().replace(b"512", b"513"))


def lose_the_manifest(directory):
    return replace(directory / MANIFEST, b"{}")


@pytest.mark.parametrize(
    "damage",
    [
        *(cut_in_half, flip_a_weight, empty, swap_libraries, lose_a_file, open_to_others),
        *(open_the_directory, change_the_manifest, lose_the_manifest),
    ],
)
def test_a_damaged_artifact_is_removed_and_made_again(kept, damage, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(Compiler, "__init__", partialmethod(_no_compiler, asked=asked))
    with restored_artifact(kept, tmp_path) as artifact:
        file = damage(artifact.path)
        with capture_logs() as logs:
            loaded = engine(kept, "auto", "bfloat16", "int4")
        assert not loaded.parts.executor.compiled
        assert asked == [artifact]
        assert not artifact.path.exists()
        warned = [entry.get("error", "") for entry in logs if entry["log_level"] == "warning"]
        assert any(str(file) in error for error in warned), logs
    assert engine(kept, "auto", "bfloat16", "int4").parts.executor.compiled


def test_a_compiled_step_that_computes_something_else_is_not_used(kept, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(Compiler, "__init__", partialmethod(_no_compiler, asked=asked))
    with restored_artifact(kept, tmp_path) as artifact:
        expected = Reference.load(artifact.path / REFERENCE)
        (artifact.path / REFERENCE).unlink()
        dataclasses.replace(expected, logits=expected.logits.flip(1)).save(
            artifact.path / REFERENCE
        )
        (artifact.path / REFERENCE).chmod(0o644)
        manifest = Manifest.read(artifact.path / MANIFEST)
        files = manifest.files | {REFERENCE: fingerprint(artifact.path / REFERENCE)}
        dataclasses.replace(manifest, files=files).write(artifact.path / MANIFEST)
        with capture_logs() as logs:
            loaded = engine(kept, "auto", "bfloat16", "int4")
        assert not loaded.parts.executor.compiled
        assert any("self-check failed: alone" in entry.get("error", "") for entry in logs), logs


def test_a_cache_that_others_can_write_to_is_not_used(kept, monkeypatch):
    monkeypatch.setattr(Compiler, "__init__", None)
    folder = locate(Recipe(str(kept), "bfloat16", "int4", 16)).path.parent
    folder.chmod(0o777)
    try:
        with capture_logs() as logs:
            loaded = engine(kept, "auto", "bfloat16", "int4")
    finally:
        folder.chmod(0o755)
    assert not loaded.parts.executor.compiled
    assert any(f"other users can write to {folder}" in entry.get("error", "") for entry in logs)


@pytest.mark.slow
def test_what_was_damaged_is_compiled_again(kept):
    artifact = locate(Recipe(str(kept), "bfloat16", "int4", 16))
    cut_in_half(artifact.path)
    assert engine(kept, "wait", "bfloat16", "int4").parts.executor.compiled
    assert artifact.path.exists()


def _no_compiler(compiler, artifact, size, needed_bytes, asked):
    compiler.step, compiler.needed_bytes = None, needed_bytes
    compiler._thread = threading.Thread()  # not started, as if it had ended
    asked.append(artifact)


@pytest.mark.slow
@pytest.mark.usefixtures("_cache")
def test_a_model_that_cannot_be_compiled_stays_eager(model, monkeypatch):
    monkeypatch.setenv("CXX", "/bin/false")
    stepper = engine(model, "wait", "float16", "none")
    assert not stepper.parts.executor.compiled
    group = stepper.submit([1, 2, 3], 4)
    stepper.run()
    assert group.sequences[0].num_output == 4


@pytest.mark.usefixtures("_cache")
def test_the_key_follows_the_model_and_the_settings(model, tmp_path):
    one = locate(Recipe(str(model), "float32", "none", 16))
    assert one == locate(Recipe(str(model), "float32", "none", 16))
    assert one.path != locate(Recipe(str(model), "bfloat16", "none", 16)).path
    other = tmp_path / "model"
    shutil.copytree(model, other)
    assert one.path == locate(Recipe(str(other), "float32", "none", 16)).path
    (other / "config.json").touch()
    assert one.path != locate(Recipe(str(other), "float32", "none", 16)).path
    assert locate(Recipe("nobody/nothing", "float32", "none", 16)) is None


@pytest.mark.parametrize(
    "given",
    [
        {"device": "cuda"},
        {"dtype": "float16", "quantization": "int4"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"block_size": 24},
        {"max_model_len": 513},
        {"max_model_len": 300, "num_blocks": 4},
        {"cache_memory": 1e6, "num_blocks": None},
        {"swap_space": 1e6},
    ],
    ids=" ".join,
)
def test_settings_mean_the_same_with_an_artifact_as_without(kept, given, monkeypatch):
    """A setting that the eager engine refuses is refused with the same message."""
    monkeypatch.setattr(Compiler, "__init__", partialmethod(_no_compiler, asked=[]))

    def told(compile_mode):
        base = {"num_blocks": 64, "swap_space": 0, "dtype": "bfloat16", "quantization": "int4"}
        settings = base | given | {"compile": compile_mode}
        try:
            parts = build(EngineSettings(model=str(kept), **settings))
        except (ModelError, StartupError) as error:
            return type(error), str(error)
        return parts.device, parts.dtype, parts.limits

    assert told("auto") == told("off")
