"""Compile every kernel variant that engines of real models launch on NVIDIA's GPUs.

`python -m tests.variants.sweep` (or `make variants`) records the launches of each model's warm-up
(see `record`), and compiles them with the installed Triton as a launch does: its driver is a
stand-in that only names the GPU. It exits with 1 if a variant does not compile or needs more shared
memory than the GPU has. What is compiled stays in --folder, so an interrupted sweep goes on there.

Inductor's kernels, between two products of a compiled step, are not among the variants.
"""

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
import triton
import triton.language as tl
from transformers.utils import logging
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from octavo.kernels.gpu import Gpu
from tests.kernels.compiling import A100, B200, H100
from tests.variants.real_models import MODELS, RealModel
from tests.variants.record import Launch, read, record, save_zeros, target_of, write

GPUS = {gpu.arch: gpu for gpu in (A100, H100, B200)}
FOLDER = Path("build/variants")
UNFINISHED = 3
"""Exit status if --seconds end before all variants are compiled."""


class NamedGpu:
    """A driver that only says which GPU there is."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        """Return the GPU."""
        return self._target

    def get_current_device(self) -> int:
        """Return its number: Triton keeps what it compiled by this."""
        return int(self._target.arch)

    def get_current_stream(self, _device: int) -> int:
        """Return the default stream."""
        return 0


@dataclass(frozen=True)
class NamedTensor:
    """An argument of which a launch that compiles needs the type and the address."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        """Return an address of the same alignment."""
        return 16 if self.aligned else 8


def compile_launch(launch: Launch, gpu: Gpu) -> CompiledKernel:
    """Compile a kernel as its first launch on a GPU does."""
    module, _, name = launch.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    arguments = {key: _argument(value) for key, value in launch.arguments.items()}
    driver.set_active(NamedGpu(target_of(gpu)))
    made: CompiledKernel = kernel.run(**arguments, **launch.options, grid=(1,), warmup=True)
    return made


def _argument(value: Any) -> Any:
    if isinstance(value, dict):
        if "type" in value:
            return tl.dtype(value["type"])
        return NamedTensor(getattr(torch, value["tensor"]), value["aligned"])
    return value


def launches_of(model: RealModel, gpus: Iterable[Gpu], folder: Path) -> dict[str, dict[str, Any]]:
    """Return a model's launches by GPU; those that no file in the folder has are recorded."""
    files = {gpu: folder / f"{model.name.partition(',')[0]}-{gpu.arch}.json" for gpu in gpus}
    missing = [gpu for gpu, file in files.items() if not file.exists()]
    if missing:
        with tempfile.TemporaryDirectory() as saved:
            save_zeros(model, Path(saved))
            found: dict[Gpu, dict[str, Launch]] = {gpu: {} for gpu in missing}
            for settings in ({}, *model.others):
                for gpu, launches in record(Path(saved), missing, settings).items():
                    found[gpu] |= launches
        for gpu in missing:
            write(found[gpu], files[gpu])
    return {gpu.arch: read(file) for gpu, file in files.items()}


def main() -> int:
    """Run the command; return its exit status."""
    options = _arguments()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(options.folder / f"triton-{triton.__version__}")
    ends = time.monotonic() + options.seconds
    gpus = [GPUS[arch] for arch in options.gpus]
    distinct: dict[str, dict[str, Launch]] = {gpu.arch: {} for gpu in gpus}
    print(f"{'variants of':32}" + "".join(f"{gpu.arch:>8}" for gpu in gpus), flush=True)
    for model in MODELS:
        if not options.models or model.name in options.models:
            found = launches_of(model, gpus, options.folder)
            print(f"{model.name:32}" + "".join(f"{len(each):8}" for each in found.values()))
            sys.stdout.flush()
            for arch, launches in found.items():
                distinct[arch] |= launches
        if time.monotonic() > ends:
            return UNFINISHED
    print(f"{'distinct':32}" + "".join(f"{len(each):8}" for each in distinct.values()), flush=True)
    if options.record:
        return 0
    bad = False
    for gpu in gpus:
        compiled, failed = compile_all(distinct[gpu.arch], gpu, ends)
        left = len(distinct[gpu.arch]) - compiled - failed
        print(
            f"Triton {triton.__version__}, {gpu.arch}: {compiled} compiled, {failed} failed,"
            f" {left} left",
            flush=True,
        )
        bad |= failed > 0
        if left:
            return UNFINISHED
    return int(bad)


def compile_all(launches: dict[str, Launch], gpu: Gpu, ends: float) -> tuple[int, int]:
    """Compile variants until a time; return the numbers of those that compile and that do not."""
    compiled = failed = 0
    for key, launch in launches.items():
        if time.monotonic() > ends:
            break
        try:
            needed = compile_launch(launch, gpu).metadata.shared
            why = f"needs {needed} bytes of shared memory" if needed > gpu.shared_bytes else None
        except Exception as error:  # noqa: BLE001 - compilers raise many types
            why = f"{type(error).__name__}: {error}"
        compiled += why is None
        failed += why is not None
        if why is not None:
            print(f"{gpu.arch}: {key}: {why[:300]}", flush=True)
    return compiled, failed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, metavar="NAME", help=str(names))
    parser.add_argument("--gpus", nargs="+", choices=list(GPUS), default=list(GPUS))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="what is done stays here")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time for this part")
    parser.add_argument("--record", action="store_true", help="compile nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
