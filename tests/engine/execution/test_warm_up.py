"""An engine that is ready has launched every kernel variant that requests may need.

Triton compiles a variant at its first launch, for seconds. Triton can name a launch's variant
without a device, so this test computes nothing.
"""

import dataclasses
import importlib
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BambaConfig,
    MixtralConfig,
    Qwen3NextConfig,
)

from octavo.engine.execution.executor import Executor
from octavo.engine.execution.follower import Follower
from octavo.engine.execution.graph_sizes import draft_model_sizes, step_sizes
from octavo.engine.execution.inputs import idle_arrays, warm_up_sizes
from octavo.engine.execution.leader import Leader
from octavo.engine.kv_cache import Transfers
from octavo.engine.models import load_model
from octavo.engine.models.checks.self_check import SelfCheck
from octavo.engine.models.experts import grouped_experts
from octavo.engine.models.sharding.rank_forward import RankForward
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.allocate import allocate
from octavo.engine.startup.build import build
from octavo.engine.startup.cache_plan import largest_batch
from octavo.kernels import low_rank
from octavo.kernels.gpu import Gpu
from octavo.kernels.logits import mask_logits
from tests.engine.execution.frozen import (
    Frozen,
    HostCopyError,
    KeptMemoryError,
    NewVariantError,
    OtherWorkError,
)
from tests.engine.parallel.test_messages import Wire
from tests.engine.random_model import TINY, save_random_model
from tests.engine.stepper import Stepper
from tests.kernels.quantized_weights import random_weight
from tests.peft_adapters import save_adapter

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from octavo.kernels.triton.experts import choose_expert_tiles  # noqa: E402
from octavo.kernels.triton.quantized_linear import _merge_kernel, many_rows  # noqa: E402
from octavo.kernels.triton.unpack import choose_unpacked_tiles  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted: there are no variants", allow_module_level=True)


EXPERTS = "octavo.kernels.triton.experts"
KERNELS = {
    "paged_attention_kernel",
    "merge_splits",
    "_write_kv_kernel",
    "_swap_blocks_kernel",
    "_draw_tokens_kernel",
    "_mask_logits_kernel",
}


class Launched(set):
    """The launched (kernel, variant) pairs.

    Attributes:
        watch: Gets each launch's kernel and arguments; None: nobody does.
    """

    watch = None


@pytest.fixture
def launched(monkeypatch):
    """The launches, as on an H100; attention returns zeros."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    found = Launched()

    def launch(kernel, *args, grid, warmup, **kwargs):
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        unknown = options.keys() - vars(backend.parse_options({})).keys()
        assert not unknown, f"{kernel.fn.__name__} has no {unknown}: a GPU's launch raises"
        variant = f"{specialization} {options}"
        found.add((kernel.fn.__name__, variant))
        if found.watch is not None:
            found.watch(kernel.fn.__name__, variant, grid, bound)
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


TOKENS = 600
"""Most tokens of a step below: enough for every tile of rows, and for dequantized weights."""


@pytest.fixture
def packs_as_on_a_gpu(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(
        load_model, "_pack", lambda *given: load_model._pack_on_gpu(given[0], *given[3:], cpu)
    )
    for check in ("check_quantization", "check_in_float32"):
        monkeypatch.setattr(load_model, check, lambda *_, **__: None)
    monkeypatch.setattr(
        grouped_experts.reference, "experts", importlib.import_module(EXPERTS).experts
    )


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture of so many experts that the tiles for few rows are needed, too."""
    path = tmp_path_factory.mktemp("mixture")
    config = MixtralConfig(**TINY | {"num_local_experts": 16, "max_position_embeddings": 2048})
    save_random_model(config, path, std=0.1)
    return path


def start(model, **settings):
    """Build an engine and warm it up as at startup on a GPU."""
    settings = {"num_blocks": 512, "block_size": 8, "max_num_seqs": 8, "swap_space": 0} | settings
    fixed = {"compile": "off", "dtype": "bfloat16", "max_num_batched_tokens": TOKENS}
    engine = Stepper(build(EngineSettings(model=str(model), **fixed, **settings)))
    executor = engine.parts.executor
    executor.execute(largest_batch(TOKENS, 1, executor.cache.layout))
    executor.warm_up(engine.parts.limits.max_model_len, TOKENS)
    return engine


def serve(engine, launched, adapters=()):
    """Run steps of one to `TOKENS` tokens, some with an adapter if there are any.

    No variant is compiled, and what is recorded replays all that a step needs.
    """
    executor, frozen = engine.parts.executor, Frozen(launched, partial(setattr, launched, "watch"))
    ready = launched.copy()
    if engine.scheduler.draft_model is not None:
        drafting = engine.scheduler.draft_model._executor
        drafting.record_graphs(draft_model_sizes(8, TOKENS), 512, frozen.record)
    drafted = 3 if engine.scheduler.speculation else 0
    executor.record_graphs(step_sizes(8, drafted, TOKENS), 2048, frozen.record)
    engine.submit([5] * 1500, 5, adapter=engine.adapter(next(iter(adapters), None)))
    engine.run()
    chosen = itertools.cycle([*map(engine.adapter, adapters), None])
    for length, count in ((1, 1), (2, 3), (25, 1), (25, 3), (100, 1), (200, 8)):
        for i in range(count):
            prompt = [3 + i] * (length // count + 1)
            engine.submit(prompt, 3, temperature=i % 2, adapter=next(chosen))
        engine.run()
    assert frozen.replayed > 12
    assert launched == ready


@pytest.mark.usefixtures("on_triton", "packs_as_on_a_gpu")
@pytest.mark.parametrize(
    ("model", "quantization"),
    [
        ("long_model", "int4"),
        ("mixture", "none"),
        ("mixture", "int4"),
        *(
            pytest.param(model, quantization, marks=pytest.mark.slow)
            for model in ("long_model", "mixture")
            for quantization in ("int8", "fp8")
        ),
    ],
)
def test_nor_one_of_quantized_weights_or_experts(launched, request, model, quantization):
    engine = start(request.getfixturevalue(model), quantization=quantization)
    kernels = {kernel for kernel, _ in launched}
    assert ("_linear_kernel" in kernels) == (quantization != "none")
    assert ("_down_kernel" in kernels) == (model == "mixture")
    serve(engine, launched)


STATES = {
    "deltas": Qwen3NextConfig(
        **TINY | {"max_position_embeddings": 2048, "layer_types": ["linear_attention"] * 2},
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=0,
    ),
    "ssd": BambaConfig(
        **TINY | {"max_position_embeddings": 2048, "attn_layer_indices": [1]},
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
    ),
}


@pytest.mark.usefixtures("on_triton", "packs_as_on_a_gpu")
@pytest.mark.parametrize("kind", STATES)
def test_nor_one_of_states(launched, tmp_path, kind):
    save_random_model(STATES[kind], tmp_path, std=0.1)
    parts = build(EngineSettings(model=str(tmp_path), compile="off", dtype="bfloat16"))
    parts.executor.warm_up(2048, TOKENS)
    assert "scan_kernel" in {kernel for kernel, _ in launched}, "as in a follower, without more"
    launched.clear()
    serve(start(tmp_path), launched)


@pytest.mark.usefixtures("on_triton", "packs_as_on_a_gpu")
@pytest.mark.parametrize("quantization", ["none", pytest.param("int4", marks=pytest.mark.slow)])
def test_nor_one_of_adapters(launched, long_model, tmp_path, monkeypatch, quantization):
    # A copy to a GPU is aligned.
    monkeypatch.setattr(low_rank, "to_device", lambda array, _: torch.from_numpy(array).clone())
    ranks = {"narrow": 1, "usual": 16, "odd": 33, "wide": 256}
    for name, rank in ranks.items():
        targets = "all-linear" if rank > 1 else ["v_proj"]
        save_adapter(long_model, tmp_path / name, r=rank, target_modules=targets)
    lora = [f"{name}={tmp_path / name}" for name in ranks]
    engine = start(long_model, quantization=quantization, lora=lora)
    assert "_up_kernel" in {kernel for kernel, _ in launched}
    serve(engine, launched, ranks)


@pytest.mark.usefixtures("on_triton", "packs_as_on_a_gpu")
def test_nor_one_of_a_draft_model(launched, long_model, tiny_model):
    drafting = {"speculation": "draft", "draft_model": str(tiny_model)}
    engine = start(long_model, num_speculative_tokens=3, **drafting)
    engine.scheduler.draft_model._executor.warm_up(512, TOKENS)
    serve(engine, launched)
    assert engine.scheduler.counters["drafted_tokens"] > 10


def _launch(launched, variant):
    launched.add(("kernel", variant))
    if launched.watch:
        launched.watch("kernel", variant)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (lambda numbers, *_: numbers.sum().item(), HostCopyError),
        (lambda numbers, *_: numbers.tolist(), HostCopyError),
        (lambda numbers, *_: numbers.nonzero(), HostCopyError),
        (lambda numbers, again, kept, _: kept.append(numbers + 1), KeptMemoryError),
        (lambda numbers, again, *_: again > 3 and numbers + 1, OtherWorkError),
        (lambda numbers, again, *_: numbers * again, OtherWorkError),
        (lambda numbers, again, *_: torch.ones(3 + again // 4) + 1, OtherWorkError),
        (lambda numbers, again, _, launched: _launch(launched, again > 2), NewVariantError),
        (lambda numbers, again, _, launched: _launch(launched, again > 3), NewVariantError),
    ],
)
def test_what_a_graph_gets_wrong_is_found(fault, error):
    """The fourth run is the first replay."""
    launched, numbers, kept, runs = Launched(), torch.ones(3), [], itertools.count(1)

    def work():
        fault(numbers, next(runs), kept, launched)
        kept[:] = kept[-1:]
        return numbers

    frozen = Frozen(launched, partial(setattr, launched, "watch"))
    with pytest.raises(error):
        frozen.record(work)()


class Rank(RankForward):
    """The step of a rank, without others."""

    def __init__(self, forward):
        self._forward = forward
        self.begin = lambda *inputs: (inputs[3] or forward)(*inputs[:3])
        self.logits = self.most_likely = lambda _: None


@pytest.mark.usefixtures("on_triton", "packs_as_on_a_gpu")
def test_nor_one_of_another_rank(launched, long_model):
    """A follower gets the messages that rank 0 sends at the start, then those of a step."""
    wire = Wire()
    parts = build(EngineSettings(model=str(long_model), compile="off", num_blocks=256))
    loaded, layout = parts.executor._loaded, parts.executor.cache.layout
    follower = Follower(
        wire,
        dataclasses.replace(loaded, forward=Rank(loaded.forward)),
        lambda blocks, _: allocate(layout, loaded, blocks, 0),
        lambda *_: (256, 0),
        recorder=None,
    )
    executor = Executor(loaded, parts.executor.cache, Leader(wire))
    executor._leader.allocate(256, 0)
    executor.warm_up(2048, TOKENS)
    executor._leader.stop()
    launched.clear()
    follower.run()
    ready = launched.copy()
    assert {"paged_attention_kernel", "merge_splits"} < {kernel for kernel, _ in ready}
    for query_lens, length in (([1], 2000), ([1, 40, 7], 300), ([1] * 8, 1), ([290], 290)):
        arrays = idle_arrays(query_lens, layout)
        seq_lens = np.maximum(arrays.seq_lens, length)
        arrays = dataclasses.replace(arrays, seq_lens=seq_lens)
        executor._leader.run(Transfers(copies=[(0, 1)]), arrays, most_likely=False)
    executor._leader.stop()
    follower.run()
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
        return rows >= many_rows(gpu, torch.bfloat16) or tiles

    assert {linear(rows) for rows in sizes} == {linear(rows) for rows in range(1, most + 1)}
    for share in (1, 1 / 2, 1 / 4, 3 / 16, 1 / 16, 4 / 128, 8 / 512):
        needed = {choose_expert_tiles(gpu, rows * share) for rows in range(1, most + 1)}
        assert {choose_expert_tiles(gpu, rows * share) for rows in sizes} == needed


def test_a_sum_of_any_number_of_slices_is_one_variant(launched):
    for splits in (2, 15, 16):
        parts, out = torch.zeros(splits, 3, 64), torch.zeros(3, 64)
        _merge_kernel[3, 1](parts, None, out, 3, 64, splits, HAS_BIAS=False, COLUMNS=512)
    assert len(launched) == 1
