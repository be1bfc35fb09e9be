"""Compiles a model's step ahead of time; runs in a process of its own.

    python -m octavo.common.leash octavo.engine.compilation.export RECIPE NAME

It takes a minute or two, and memory for the model three times over, so it runs
niced beside the service, which answers without it meanwhile.
"""

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from octavo.common.models.cache import prepare
from octavo.engine.attention import operator as paged_attention  # noqa: F401 - define the operators
from octavo.engine.compilation.artifact import MANIFEST, REFERENCE, Manifest, Recipe, fingerprints
from octavo.engine.compilation.capture import capture
from octavo.engine.compilation.experts import call_grouped_products
from octavo.engine.compilation.fusion import fuse
from octavo.engine.models.linear import packed_linear as linear  # noqa: F401 - define the operators
from octavo.engine.models.load_model import load
from octavo.engine.models.quantization.quantize import unquantized
from octavo.engine.models.step import EagerStep
from octavo.kernels import machine

NICENESS = 19

_LAYER = "AtenTensorHandle x, int64_t outputs, AtenTensorHandle panels, AtenTensorHandle bias"
_SCALES = "AtenTensorHandle factors, AtenTensorHandle scales, AtenTensorHandle row_sums"
_FUSED = "int64_t gated, AtenTensorHandle* norm, double epsilon, AtenTensorHandle* residual"
SHIMS = {
    "paged_attention": "AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,"
    " int64_t layer, double scale, int64_t* sliding_window, double* soft_cap,"
    " AtenTensorHandle* cos, AtenTensorHandle* sin",
    "packed_linear": f"{_LAYER}, {_FUSED}",
    "packed_linear_wide": _LAYER,
    "packed_linear_int8": f"{_LAYER}, {_SCALES}, {_FUSED}",
    "packed_linear_int4": f"{_LAYER}, {_SCALES}, AtenTensorHandle nibbles, {_FUSED}",
    # PyTorch's own.
    "_grouped_mm": "AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle* offs,"
    " AtenTensorHandle* bias, int32_t* out_dtype",
}
"""The arguments of the functions, in kernels/cpu/aoti.cpp but for the last, which are called in
place of these operators."""
INDUCTOR: dict[str, Any] = {
    "freezing": True,  # weights are constants, packed once for oneDNN
    "aot_inductor.compile_wrapper_opt_level": "O2",  # by -O0 a decode takes 0.15 ms longer
    "aot_inductor.precompile_headers": False,  # pays from the second compilation on
    "aot_inductor.custom_ops_to_c_shims": {
        getattr(torch.ops.octavo, name).default: [
            f"AOTITorchError aoti_torch_cpu_{name}({arguments}, AtenTensorHandle* result)"
        ]
        for name, arguments in SHIMS.items()
    },
}


class UncallableOperatorError(Exception):
    """A model calls operators that a compiled library cannot call."""


def main() -> None:
    """Compiles the recipe in the arguments."""
    recipe, name = Recipe(**json.loads(sys.argv[1])), sys.argv[2]
    os.nice(NICENESS)

    def make(result: Path, _: object) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(result.with_name("inductor"))
        result.mkdir()
        compile_step(recipe, result, result.parent)

    prepare(name, make)  # of several engines that start at once, one compiles


@torch.no_grad()
def compile_step(recipe: Recipe, result: Path, scratch: Path) -> None:
    """Compiles a model's step.

    Args:
        recipe: which model, and how.
        result: an empty directory that becomes the artifact.
        scratch: a directory for what is in between.

    Raises:
        Exception: whatever transformers, torch or the C++ compiler raise.
    """
    loaded = load(
        recipe.model,
        dtype=recipe.dtype,
        device="cpu",
        block_size=recipe.block_size,
        quantization=recipe.quantization,
        max_model_len=recipe.max_model_len,
    )
    # For two tokens or more, and it serves one too, as tests show: no loop depends on two.
    exported = capture(EagerStep(loaded.model), loaded.device)
    fuse(exported.graph)
    call_grouped_products(exported.graph)
    exported.graph_module.recompile()
    library = compile_graph(exported, result, scratch)
    loaded.reference.save(result / REFERENCE)
    dtype = str(loaded.dtype).removeprefix("torch.")
    for file in result.iterdir():
        file.chmod(0o644)  # whatever the umask: it is not loaded if others can write to it
    result.chmod(0o755)
    left = unquantized(loaded.model) if recipe.quantization != "none" else {}
    Manifest(loaded.shape, dtype, library, fingerprints(result), left).write(result / MANIFEST)
    (result / MANIFEST).chmod(0o644)


def compile_graph(exported: ExportedProgram, result: Path, scratch: Path) -> str:
    """Compile a graph to a library, and return its file's name.

    Args:
        exported: the graph.
        result: an empty directory, to which the library and what it reads are written.
        scratch: a directory for what is in between.

    Raises:
        UncallableOperatorError: the library would have to call operators in Python.
        Exception: whatever torch or the C++ compiler raise.
    """
    package = scratch / "step.pt2"
    options = INDUCTOR.copy()
    if hasattr(torch._inductor.config.cpp, "march"):  # noqa: SLF001 - not in PyTorch 2.11
        options["cpp.march"] = machine.march()
    torch._inductor.aoti_compile_and_package(  # noqa: SLF001 - public by its manual
        exported, package_path=str(package), inductor_configs=options
    )
    library = _unpack(package, result)
    if names := _uncallable(result):
        raise UncallableOperatorError(
            f"it calls {', '.join(names)}, which a compiled library cannot call"
        )
    return library


def _uncallable(directory: Path) -> list[str]:
    """Return the operators that a library would have called by PyTorch's dispatcher.

    It runs without: inductor lists what it found no C function for beside the library.
    """
    listed = [json.loads(file.read_bytes()) for file in directory.glob("*.json")]
    return sorted({node["node"]["target"] for data in listed for node in data.get("nodes", [])})


def _unpack(package: Path, directory: Path) -> str:
    """Takes the library and what it reads beside it out of a package; returns its name."""
    library = ""
    with zipfile.ZipFile(package) as archive:
        for member in archive.namelist():
            path = Path(member)
            if "aotinductor" not in path.parts or path.suffix == ".cpp":
                continue
            (directory / path.name).write_bytes(archive.read(member))
            library = path.name if path.suffix == ".so" else library
    return library


if __name__ == "__main__":
    main()
