"""Families of models with each kind of layer group and of attention, compiled in bfloat16.

A compiled step that fails the self-check is not used, so being compiled is having passed it.
"""

import pytest
from structlog.testing import capture_logs

from octavo.common.models.cache import cache_dir
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import build
from tests.architectures.entries import entries
from tests.architectures.serve import save

FAMILIES = [
    *("gpt_oss", "qwen3_next", "qwen3_5_text", "deepseek_v3", "glm4_moe_lite", "granitemoehybrid"),
    *("nemotron_h", "falcon_h1", "lfm2", "gemma3n_text", "gemma4_text", "llama4_text, chunks"),
    *("phi3, longrope", "falcon", "gptj", "mpt", "bloom"),
]


@pytest.mark.slow  # compiles for minutes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_passes_its_check_compiled(name, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    entry = next(entry for entry in entries() if entry.name == name)
    save(entry, tmp_path / "model")
    settings = {"num_blocks": 64, "swap_space": 0, "compile": "wait", "dtype": "bfloat16"}
    settings["max_model_len"] = entry.max_model_len
    with capture_logs() as logs:
        parts = build(EngineSettings(model=str(tmp_path / "model"), block_size=8, **settings))
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert parts.executor.compiled, warnings
    *_, compiled = [entry for entry in logs if entry["event"] == "self-check passed"]
    print(name, compiled)
    assert compiled["packed"] < 0.05
