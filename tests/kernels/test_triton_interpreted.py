"""Runs test_triton.py under Triton's interpreter, and compiles the kernels for GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent

# Needs no GPU: Triton brings its own assembler.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.triton.paged_attention import _paged_attention_kernel as kernel
from kernels.triton.write_kv import _write_kv_kernel as write_kernel
from kernels.triton.copy_blocks import _swap_blocks_kernel as swap_kernel

def compile(kernel, pointers, constants, floats=(), arch=80):
    names = kernel.arg_names
    signature = {name: pointers.get(name, "i32") for name in names}
    signature |= dict.fromkeys(floats, "fp32") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()})
    return triton.compile(source, GPUTarget("cuda", arch, 32), {"num_warps": 4, "num_stages": 2})

ints = dict.fromkeys(("query_starts", "seq_lens", "block_tables"), "*i32")
for dtype, keys, features in (("bf16", 64, False), ("fp32", 32, True)):
    data = dict.fromkeys(("query", "key_cache", "value_cache", "out"), "*" + dtype)
    made = compile(kernel, data | ints | {"alibi_slopes": "*fp32"}, dict(
        NUM_HEADS=9, GROUP=3, HEAD_DIM=80, PADDED_DIM=128, BLOCK_SIZE=16, ROWS=64, KEYS=keys,
        HAS_WINDOW=features, HAS_CAP=features, HAS_ALIBI=features, LOG2_E=1.44, UPCAST=False,
    ), ("scale", "soft_cap"))
    assert made.metadata.shared <= 99 * 1024, made.metadata.shared
data = dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*bf16")
compile(write_kernel, data | {"slot_mapping": "*i64"},
        dict(NUM_KV_HEADS=3, HEAD_DIM=80, PADDED=256))
data = dict.fromkeys(("source", "destination"), "*i32")
data |= dict.fromkeys(("source_blocks", "destination_blocks"), "*i64")
for arch in (80, 90):
    compile(swap_kernel, data, dict(WORDS=1024), arch=arch)
"""


def run(*command, **environment):
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_interpreted():
    out = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "test_triton.py"),
        TRITON_INTERPRET="1",
    )  # fmt: skip
    assert "skipped" not in out


def test_compiles_for_gpus(tmp_path):
    run("-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
