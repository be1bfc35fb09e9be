"""Families of models with each kind of layer group and of attention, traced in bfloat16.

A traced step that fails the self-check is not used, so a traced model has passed it.
"""

import pytest
from structlog.testing import capture_logs

from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.architectures.entries import entries
from tests.architectures.serve import save

FAMILIES = [
    *("gpt_oss", "qwen3_next", "qwen3_5_text", "deepseek_v3", "glm4_moe_lite", "granitemoehybrid"),
    *("nemotron_h", "falcon_h1", "lfm2", "gemma3n_text", "gemma4_text", "llama4_text, chunks"),
    *("phi3, longrope", "falcon", "gptj", "mpt", "bloom"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_passes_its_check_traced(name, tmp_path):
    entry = next(entry for entry in entries() if entry.name == name)
    save(entry, tmp_path)
    settings = {"num_blocks": 64, "swap_space": 0, "compile": "auto", "dtype": "bfloat16"}
    settings["max_model_len"] = entry.max_model_len
    with capture_logs() as logs:
        parts = build(EngineSettings(model=str(tmp_path), block_size=8, **settings))
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert parts.executor.compiled, warnings
    *_, traced = [entry for entry in logs if entry["event"] == "self-check passed"]
    assert traced["packed"] < 0.05
