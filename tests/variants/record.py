"""Records the kernels that the engine of a real model launches on a GPU that this machine lacks.

The engine's own warm-up launches them, on the CPU: it computes nothing. An engine that is ready
launches no others (tests/engine/execution/test_warm_up.py holds this).
"""

import copy
import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from octavo.engine.compilation.jit import JitForward
from octavo.engine.models import load_model
from octavo.engine.models.checks.self_check import SelfCheck
from octavo.engine.models.experts import grouped_experts
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.engine.startup.cache_plan import largest_batch
from octavo.kernels import gpu as gpus
from octavo.kernels import logits, low_rank, ops, states
from octavo.kernels import triton as kernels
from octavo.kernels.gpu import Gpu, describe_gpu
from tests.engine.models.quantization.formats.quantize import quantize
from tests.peft_adapters import save_adapter
from tests.variants.real_models import RealModel

CONTEXT, BATCHED_TOKENS = 8192, 2048
"""An engine's steps have up to 8,192 tokens, but no tile of rows begins above 1,024."""
WIDTHS = {"intermediate_size": 1024, "vocab_size": 2048}
"""Multiples of 16, in place of real ones: kernels only know which widths are such multiples."""


@dataclass(frozen=True)
class Launch:
    """A kernel's launch.

    Attributes:
        kernel: Its module and name.
        arguments: Numbers as they are; of a tensor or a type, what `describe` returns.
        options: Warps, stages and the like.
    """

    kernel: str
    arguments: dict[str, Any]
    options: dict[str, Any]


def describe(value: object) -> object:
    """Return the properties of an argument that distinguish variants, for JSON."""
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return {"tensor": name, "aligned": value.data_ptr() % 16 == 0}
    if isinstance(value, tl.dtype):
        return {"type": value.name}
    assert value is None or isinstance(value, bool | int | float | str), value
    return value


@contextmanager
def recording(gpu: Gpu) -> Iterator[dict[str, Launch]]:
    """Record one launch of each variant, and launch none."""
    found: dict[str, Launch] = {}
    backend = make_backend(target_of(gpu))

    def launch(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        if "UPCAST" in kwargs:
            kwargs["UPCAST"] = False  # a CPU's interpreter alone needs it
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        name = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
        described = {key: describe(value) for key, value in bound.items()}
        found.setdefault(f"{name} {specialization} {options}", Launch(name, described, options))
        if isinstance(out := bound.get("out"), torch.Tensor):
            out.zero_()  # tokens must exist

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", launch)
        yield found


def target_of(gpu: Gpu) -> GPUTarget:
    """Return Triton's name of an NVIDIA GPU."""
    return GPUTarget("cuda", int(gpu.arch.removeprefix("sm_")), gpu.warp_size)


class _NoProducts(TorchDispatchMode):
    """Lets products give zeros: they would take most of the time."""

    def __torch_dispatch__(
        self, called: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if called in {aten.mm.default, aten.addmm.default, aten.linear.default}:
            left, right = args[1:3] if called is aten.addmm.default else args[:2]
            columns = right.shape[0 if called is aten.linear.default else 1]
            return left.new_zeros((*left.shape[:-1], columns))
        return called(*args, **(kwargs or {}))


@contextmanager
def as_on(gpu: Gpu) -> Iterator[None]:
    """Let the CPU be a GPU: its weights are packed for it, and its kernels are launched."""
    cpu = torch.device("cpu")
    fp8, experts = (
        importlib.import_module(f"octavo.kernels.triton.{name}")
        for name in ("fp8_linear", "experts")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpus, "INTERPRETER", gpu)
        describe_gpu.cache_clear()
        for module in (ops, logits, states):
            patch.setattr(module, "find_backend", lambda _: kernels)
        patch.setattr(kernels, "check_device", lambda *_: None)
        patch.setattr(kernels, "has_fp8_products", lambda *_: gpu.e4m3 is not None)
        patch.setattr(
            fp8,
            "multiply",
            lambda rows, weight, _, __, dtype: torch.zeros((len(rows), len(weight)), dtype=dtype),
        )
        patch.setattr(
            load_model, "_pack", lambda *given: load_model._pack_on_gpu(given[0], *given[3:], cpu)
        )
        for check in ("check_quantization", "check_in_float32"):
            patch.setattr(load_model, check, lambda *_, **__: None)
        patch.setattr(SelfCheck, "__call__", lambda *_, **__: None)
        patch.setattr(grouped_experts.reference, "experts", experts.experts)
        # A copy to a GPU is aligned.
        patch.setattr(low_rank, "to_device", lambda array, _: torch.from_numpy(array).clone())
        patch.setattr(torch, "compile", lambda step, **_: step)
        yield
    describe_gpu.cache_clear()


def save_zeros(model: RealModel, folder: Path) -> None:
    """Save a model whose weights are zero, with `WIDTHS`."""
    config = copy.deepcopy(model.config)
    for name, width in WIDTHS.items():
        real = getattr(config, name, 0)
        if real > width:
            setattr(config, name, width + real % 16)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(default)
    made.to_empty(device="cpu")
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.detach().zero_()
    made.save_pretrained(folder)
    if model.mxfp4:
        quantize(folder, {"quant_method": "mxfp4"}, _zero_mxfp4)


def _zero_mxfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    groups = (*weight.shape[:-1], weight.shape[-1] // 32)
    blocks = torch.zeros((*groups, 16), dtype=torch.uint8)
    return {"blocks": blocks, "scales": torch.full(groups, 127, dtype=torch.uint8)}, weight


def record(
    folder: Path, gpus: Sequence[Gpu], settings: dict[str, Any]
) -> dict[Gpu, dict[str, Launch]]:
    """Return the variants that an engine of a saved model launches on GPUs, by their keys.

    Args:
        folder: The model's folder.
        gpus: The GPUs.
        settings: Some of the engine's settings.
    """
    settings = {"dtype": "bfloat16"} | settings
    if settings.pop("lora", None):
        if not (folder / "adapter").exists():
            save_adapter(folder, folder / "adapter", r=16, target_modules="all-linear")
        settings["lora"] = [f"a={folder / 'adapter'}"]
    found: dict[Gpu, dict[str, Launch]] = {}
    for fp8 in (False, True):
        if alike := [gpu for gpu in gpus if bool(gpu.e4m3) == fp8]:
            if "kv_cache_dtype" in settings:
                settings["kv_cache_dtype"] = "fp8_e4m3" if fp8 else "fp8_e5m2"
            found |= _record(folder, alike, settings)
    return found


def _record(
    folder: Path, gpus: Sequence[Gpu], settings: dict[str, Any]
) -> dict[Gpu, dict[str, Launch]]:
    """Record one engine's warm-ups, on GPUs for which weights are packed alike."""
    fixed = {"compile": "off", "num_blocks": CONTEXT // 16, "swap_space": 0}
    with as_on(gpus[0]), recording(gpus[0]):
        executor = build(EngineSettings(model=str(folder), **fixed, **settings)).executor
        loaded = executor._loaded
        steps = [loaded]
        # As compiled, too: rotary embeddings are fused with the writes of keys and values there.
        try:
            steps.append(replace(loaded, forward=JitForward(loaded.forward, loaded.device)))
        except Exception as error:  # noqa: BLE001 - as in an engine, which then runs uncompiled
            print(f"runs uncompiled: {str(error).splitlines()[0][:80]}")
    found = {}
    for gpu in gpus:
        with as_on(gpu), recording(gpu) as found[gpu], _NoProducts():
            executor._loaded = loaded
            executor.execute(largest_batch(BATCHED_TOKENS - 1, 1, executor.cache.layout))
            for step in steps:
                executor._loaded = step
                executor.warm_up(CONTEXT, BATCHED_TOKENS)
    return found


def write(launches: dict[str, Launch], path: Path) -> None:
    """Write launches to a file."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({key: vars(each) for key, each in launches.items()}))
    partial.rename(path)


def read(path: Path) -> dict[str, Launch]:
    """Read launches that `write` wrote."""
    return {key: Launch(**each) for key, each in json.loads(path.read_text()).items()}
