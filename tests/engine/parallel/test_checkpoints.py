"""Quantized checkpoints give the same tokens on several ranks or stages as in one process."""

import numpy as np
import pytest
from transformers import GptOssConfig, LlamaConfig, Qwen3MoeConfig

from octavo.engine.models.resolve_or_convert import resolve
from tests.engine.models.quantization.formats import packers, test_gguf
from tests.engine.models.quantization.formats.quantize import quantize
from tests.engine.models.quantization.formats.test_quantized_checkpoints import CASES, SMALL
from tests.engine.parallel.harness import run_kind, run_ranks, score_errors
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


def cases(paths, *dtypes, compiles="auto"):
    given = {"num_blocks": 96, "preemption": "swap", "block_size": 16, "compile": compiles}
    return {
        f"{name} {dtype}": {"model": path, "settings": given | {"dtype": dtype}}
        for name, path in paths.items()
        for dtype in dtypes
    }


def assert_stages_give_the_same(given, folder):
    one = run_ranks(1, given, folder)
    found = run_kind("two stages", given, folder)
    for case, alone in one.items():
        assert found[case]["tokens"] == alone["tokens"], case
        assert found[case]["compiled"], case


def assert_ranks_give_the_same(kinds, paths, folder, share=0.55):
    """Check for equal tokens in float32, small rounding errors in bfloat16, and small shards.

    Args:
        kinds: Kinds of ranks.
        paths: The models' paths by name.
        folder: Folder in which the ranks find each other.
        share: Maximum share of the weights' bytes on rank 0.
    """
    given = {
        name: case | {"work": "mixed scored"}
        for name, case in cases(paths, "float32", "bfloat16", compiles="off").items()
    }
    one = run_ranks(1, given, folder)
    for kind in kinds:
        found = run_kind(kind, given, folder, has_experts=lambda _: True)
        for name in paths:
            exact, rounded = f"{name} float32", f"{name} bfloat16"
            assert found[exact]["tokens"] == one[exact]["tokens"], (kind, name)
            of_one, of_ranks = (
                np.sqrt(np.mean(score_errors(each[rounded], one[exact]) ** 2))
                for each in (one, found)
            )
            assert of_ranks < 1.5 * of_one + 0.005, (kind, name)
            held, whole = (each[rounded]["weight_bytes"] for each in (found, one))
            assert held < share * whole, (kind, name)


def test_weights_run_as_they_are_stored_in_two_stages(tmp_path):
    assert_stages_give_the_same(cases(save(tmp_path, "llama", ["awq"]), "bfloat16"), tmp_path)


def test_a_rank_holds_its_part_of_weights_as_they_are_stored(tmp_path):
    assert_ranks_give_the_same(["two ranks"], save(tmp_path, "llama", ["awq"]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", PAIRS)
def test_every_format_gives_the_same_in_two_stages(family, tmp_path):
    paths = save(tmp_path, family, PAIRS[family])
    assert_stages_give_the_same(cases(paths, "float32", "bfloat16"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", PAIRS)
def test_every_format_gives_the_same_on_ranks(family, tmp_path):
    whole_experts = [] if family == "llama" else ["whole experts on two"]
    kinds = ["two ranks", "two stages of two", *whole_experts]
    # Inputs in activation order have groups of unequal size on a rank, which run in floats.
    paths = save(tmp_path, family, PAIRS[family])
    assert_ranks_give_the_same(kinds, paths, tmp_path, 0.7 if family == "llama" else 0.55)


@pytest.mark.slow
def test_gguf_files_stay_in_blocks_on_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    file = str(test_gguf.write(tmp_path / "tiny.gguf", "llama", test_gguf.q4_k_m))
    assert resolve(file, packed=True) != resolve(file)
    assert_stages_give_the_same(cases({"gguf": file}, "bfloat16"), tmp_path)
    # Half of its attention's inputs are no whole blocks, which run in floats.
    kinds = ["two ranks", "two stages of two"]
    assert_ranks_give_the_same(kinds, {"gguf": file}, tmp_path, 0.7)
