"""Every kernel that engines of real models launch compiles: a few here, all in the slow sweep."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

import triton

from tests.kernels.compiling import A100, B200, H100
from tests.variants.real_models import MODELS
from tests.variants.record import Launch, record, save_zeros
from tests.variants.sweep import compile_all, compile_launch

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted: there is nothing to compile", allow_module_level=True)

CACHE, BLOCKS = {"tensor": "int32", "aligned": True}, {"tensor": "int64", "aligned": False}
COPY = Launch(
    "octavo.kernels.triton.copy_blocks:_swap_blocks_kernel",
    {
        "source": CACHE,
        "destination": CACHE,
        "source_blocks": BLOCKS,
        "destination_blocks": BLOCKS,
        "block_words": 32_768,
        "WORDS": 1024,
    },
    {},
)


@pytest.fixture(autouse=True)
def compile_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def test_a_launch_is_compiled_as_on_the_gpu_that_the_driver_names():
    made = compile_launch(COPY, B200)
    assert made.metadata.target.arch == 100
    assert ".target sm_100" in made.asm["ptx"]
    assert "ld.global.v4" in made.asm["ptx"], "addresses are known to be multiples of 16"


def test_a_variant_that_does_not_compile_is_counted(capsys):
    broken = Launch(COPY.kernel, COPY.arguments | {"WORDS": 1000}, {})  # not a power of two
    assert compile_all({"copy": COPY, "broken": broken}, A100, float("inf")) == (1, 1)
    assert "sm_80: broken: " in capsys.readouterr().out


@pytest.mark.slow
def test_an_engine_of_a_real_model_launches_all_kinds_of_kernels(tmp_path):
    model = MODELS[0]
    save_zeros(model, tmp_path)
    names = set()
    for settings in ({}, *model.others):
        found = record(tmp_path, [H100], settings)[H100]
        names |= {launch.kernel.partition(":")[2] for launch in found.values()}
    assert {"paged_attention_kernel", "merge_splits", "_rotate_and_write_kernel"} <= names
    assert {"_write_kv_kernel", "_linear_kernel", "_draw_tokens_kernel", "_up_kernel"} <= names


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_compile():
    command = [sys.executable, "-m", "tests.variants.sweep"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:]
