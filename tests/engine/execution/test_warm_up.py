"""An engine that is ready has launched every kernel variant that requests may need.

Triton compiles a variant at its first launch, for seconds. Triton can name a launch's variant
without a device, so this test computes nothing.
"""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.engine.execution.inputs import warm_up_sizes
from octavo.engine.models.checks.self_check import SelfCheck
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.engine.startup.cache_plan import largest_batch
from octavo.kernels.gpu import Gpu
from octavo.kernels.logits import mask_logits
from tests.engine.stepper import Stepper
from tests.kernels.quantized_weights import random_weight

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from octavo.kernels.triton.experts import choose_expert_tiles  # noqa: E402
from octavo.kernels.triton.quantized_linear import MANY_ROWS, _merge_kernel  # noqa: E402
from octavo.kernels.triton.unpack import choose_unpacked_tiles  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted: there are no variants", allow_module_level=True)


KERNELS = {
    "paged_attention_kernel",
    "merge_splits",
    "_write_kv_kernel",
    "_swap_blocks_kernel",
    "_draw_tokens_kernel",
    "_mask_logits_kernel",
}


@pytest.fixture
def launched(monkeypatch):
    """The launched (kernel, variant) pairs, as on an H100; attention returns zeros."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    found = set()

    def launch(kernel, *args, grid, warmup, **kwargs):
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = bind(*args, **kwargs)
        found.add((kernel.fn.__name__, f"{specialization} {options}"))
        if "out" in kwargs:
            kwargs["out"].zero_()

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(SelfCheck, "__call__", lambda *_, **__: None)  # otherwise all are zeros
    return found


@pytest.fixture(scope="module")
def long_model(tiny_model, tmp_path_factory):
    """A model with so long a context that several programs share a sequence's keys.

    Its number of heads gives a lone token's heads another alignment in Triton's view.
    """
    path = tmp_path_factory.mktemp("long")
    config = AutoConfig.from_pretrained(tiny_model, max_position_embeddings=2048, head_dim=40)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_no_request_is_the_first_to_need_a_kernel(launched, long_model, kv_cache_dtype):
    settings = EngineSettings(
        model=str(long_model),
        kv_cache_dtype=kv_cache_dtype,
        num_blocks=256,
        block_size=8,
        max_num_seqs=8,
        swap_space=0.1,
        preemption="swap",
        compile="off",  # a CPU's traced steps call no Triton kernels
    )
    engine = Stepper(build(settings))
    executor = engine.parts.executor
    # As at startup on a GPU.
    executor.execute(largest_batch(32, 1, executor.cache.layout))
    executor.warm_up(engine.parts.limits.max_model_len, 32)
    ready = launched.copy()
    assert {kernel for kernel, _ in ready} == KERNELS

    # Sequences alone, among others, too many for the cache, and with siblings that copy blocks.
    for count in (1, 3, 8):
        for i in range(count):
            engine.submit([3 + i] * (1 + 151 * i), 3 + i, n=1 + i % 3, temperature=i % 3)
        engine.run()
    engine.submit([5] * 1990, 40)
    engine.run()
    assert any(batch.transfers.swap_in for batch in engine.batches)
    assert any(batch.transfers.copies for batch in engine.batches)
    mask_logits(torch.zeros(3, 500), [0, 2], np.zeros((2, 16), np.int32))  # as of constraints
    assert launched == ready


@pytest.mark.parametrize("most", [1, 23, 24, 100, 512, 8192])
def test_every_tile_of_rows_is_needed_by_a_step_of_the_warm_up(most):
    """Steps of 1 token and of the most tokens also run."""
    gpu = Gpu("H100", "sm_90", 32, 227 << 10, 132)
    weight = random_weight("nibbles", 64, 4096, 128, torch.Generator().manual_seed(0))
    sizes = {1, most, *warm_up_sizes(most)}
    assert max(sizes) == most

    def linear(rows):
        tiles = choose_unpacked_tiles(gpu, rows, weight, torch.bfloat16)
        return rows >= MANY_ROWS or tiles

    assert {linear(rows) for rows in sizes} == {linear(rows) for rows in range(1, most + 1)}
    for share in (1, 1 / 2, 1 / 4, 3 / 16, 1 / 16, 4 / 128, 8 / 512):
        needed = {choose_expert_tiles(gpu, rows * share) for rows in range(1, most + 1)}
        assert {choose_expert_tiles(gpu, rows * share) for rows in sizes} == needed


def test_a_sum_of_any_number_of_slices_is_one_variant(launched):
    for splits in (2, 15, 16):
        parts, out = torch.zeros(splits, 3, 64), torch.zeros(3, 64)
        _merge_kernel[3, 1](parts, None, out, 3, 64, splits, HAS_BIAS=False, COLUMNS=512)
    assert len(launched) == 1
