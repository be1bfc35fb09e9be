"""Stages of checkpoints with quantized weights sample the tokens of one process."""

import pytest
from transformers import GptOssConfig, LlamaConfig, Qwen3MoeConfig

from octavo.engine.models.resolve_or_convert import resolve
from tests.engine.models.quantization.formats import packers, test_gguf
from tests.engine.models.quantization.formats.quantize import quantize
from tests.engine.models.quantization.formats.test_quantized_checkpoints import CASES, SMALL
from tests.engine.parallel.harness import run_ranks
from tests.engine.parallel.test_stages import in_stages
from tests.engine.random_model import save_random_model

EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
SIZES = SMALL | {"vocab_size": 500, "num_hidden_layers": 3}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=64),
    "gpt_oss": GptOssConfig(**SIZES, **EXPERTS),
}
GIVEN = CASES | {"mxfp4": ({"quant_method": "mxfp4"}, packers.mxfp4, None)}
PAIRS = {
    "llama": ("awq", "gptq order", "w4a16 zeros", "w8a8", "fp8 by tensor", "fp8 blocks"),
    "qwen3_moe": ("awq", "gptq", "fp8 blocks"),
    "gpt_oss": ("mxfp4",),
}


def save(folder, family, names):
    """Save quantized models; return their paths by name."""
    paths = {}
    for name in names:
        settings, pack, _ = GIVEN[name]
        path = folder / f"{family} {name}".replace(" ", "_")
        save_random_model(CONFIGS[family], path, std=0.1)
        quantize(path, settings, pack)
        paths[path.name] = str(path)
    return paths


def cases(paths, *dtypes):
    given = {"num_blocks": 96, "preemption": "swap", "block_size": 16, "compile": "auto"}
    return {
        f"{name} {dtype}": {"model": path, "settings": given | {"dtype": dtype}}
        for name, path in paths.items()
        for dtype in dtypes
    }


def assert_stages_give_the_same(given, folder):
    one = run_ranks(1, given, folder)
    found = run_ranks(2, in_stages(given, 2), folder)
    for case, alone in one.items():
        assert found[case]["tokens"] == alone["tokens"], case
        assert found[case]["compiled"], case


def test_weights_run_as_they_are_stored_in_two_stages(tmp_path):
    assert_stages_give_the_same(cases(save(tmp_path, "llama", ["awq"]), "bfloat16"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", PAIRS)
def test_every_format_gives_the_same_in_two_stages(family, tmp_path):
    paths = save(tmp_path, family, PAIRS[family])
    assert_stages_give_the_same(cases(paths, "float32", "bfloat16"), tmp_path)


@pytest.mark.slow
def test_gguf_files_stay_in_blocks_in_two_stages(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    file = str(test_gguf.write(tmp_path / "tiny.gguf", "llama", test_gguf.q4_k_m))
    assert resolve(file, packed=True) != resolve(file)
    assert_stages_give_the_same(cases({"gguf": file}, "bfloat16"), tmp_path)
