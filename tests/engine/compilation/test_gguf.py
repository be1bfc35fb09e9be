"""A GGUF file's blocks in steps that are compiled, or translated for lack of a C++ compiler."""

import pytest

from octavo.common.models.cache import cache_dir
from octavo.common.models.resolve import resolve
from octavo.engine.compilation import Recipe, artifact, background, export, locate
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import build
from tests.engine.compilation.test_compilation import check, outputs
from tests.engine.models.quantization.checkpoints.test_gguf import q4_k_m, write
from tests.engine.stepper import Stepper


def engine(model, mode, dtype):
    settings = {"num_blocks": 64, "swap_space": 0, "compile": mode, "dtype": dtype}
    return Stepper(build(EngineSettings(model=str(model), **settings)))


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    return write(tmp_path / "tiny.gguf", "qwen2", q4_k_m)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("bfloat16", 0.3), pytest.param("float32", 1e-3, marks=pytest.mark.slow)],
)
def test_translated(file, dtype, tolerance, monkeypatch, tmp_path):
    for module in (artifact, background, export):
        monkeypatch.setattr(module, "has_compiler", lambda: False)
    expected = outputs(engine(file, "off", dtype))
    recipe = Recipe(resolve(str(file), packed=True), dtype, "none", 16)
    made = locate(recipe)
    made.path.mkdir(parents=True)
    export.compile_step(recipe, made.path, tmp_path)
    stepper = engine(file, "auto", dtype)
    assert stepper.parts.executor.compiled
    check(outputs(stepper), expected, tolerance)


@pytest.mark.slow  # compiles for minutes
@pytest.mark.timeout(600)
def test_compiled(file):
    expected = outputs(engine(file, "off", "bfloat16"))
    stepper = engine(file, "wait", "bfloat16")
    assert stepper.parts.executor.compiled
    check(outputs(stepper), expected, 0.3)
