"""Compiles or translates a model's step ahead of time, in a process of its own.

    python -m octavo.common.leash octavo.engine.compilation.export RECIPE NAME [CAPTURED]

CAPTURED is the directory of a step that is captured already, as that of one of several ranks.
This takes minutes, and memory of four times the weights (`COMPILER_COPIES` in load_step.py). The
process is niced, and the engine serves requests uncompiled meanwhile.
"""

import json
import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram

from octavo.common.models.cache import prepare
from octavo.common.models.errors import first_line
from octavo.engine.attention import packed_latents, state_operators
from octavo.engine.compilation.artifact import (
    ADAPTED,
    MANIFEST,
    REFERENCE,
    Recipe,
    fingerprints,
)
from octavo.engine.compilation.captured import CapturedStep, capture_step
from octavo.engine.compilation.cpp_compiler import has_compiler
from octavo.engine.compilation.experts import GROUPED_PRODUCT, call_grouped_products
from octavo.engine.compilation.fusion import fuse
from octavo.engine.compilation.translation import translate
from octavo.engine.models.experts import packed_experts
from octavo.engine.models.linear import packed_linear
from octavo.engine.models.linear.adapted_layers import ADD_ADAPTERS
from octavo.engine.models.load_model import load
from octavo.engine.models.quantization import find_scheme
from octavo.engine.ranks import collectives
from octavo.kernels import machine

NICENESS = 19
NO_COMPILER = "there is no C++ compiler"

C_TYPES = {
    "Tensor": "AtenTensorHandle",
    "Optional[Tensor]": "AtenTensorHandle*",
    "int": "int64_t",
    "Optional[int]": "int64_t*",
    "bool": "int32_t",
    "float": "double",
    "Optional[float]": "double*",
    "Optional[ScalarType]": "int32_t*",
}
"""The C type of each type in an operator's schema."""
INDUCTOR: dict[str, Any] = {
    "freezing": True,  # weights are constants, packed once for oneDNN
    "aot_inductor.compile_wrapper_opt_level": "O2",  # with -O0 a decode takes 0.15 ms longer
    "aot_inductor.precompile_headers": False,  # pays off only from the second compilation on
}


class UncallableOperatorError(Exception):
    """A model calls operators that a compiled library cannot call."""


def main() -> None:
    """Compile the recipe in the arguments."""
    recipe, name, *directories = Recipe(**json.loads(sys.argv[1])), *sys.argv[2:]
    os.nice(NICENESS)

    def make(result: Path, _: object) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(result.with_name("inductor"))
        result.mkdir()
        if directories:
            find_scheme(recipe.quantization)  # defines the operators of the scheme's layers
            compile_captured(CapturedStep.load(Path(directories[0])), result, result.parent)
        else:
            compile_step(recipe, result, result.parent)

    prepare(name, make)  # of several engines that start together, one compiles


def compile_step(recipe: Recipe, result: Path, scratch: Path) -> None:
    """Load a model, and compile its step or translate it if it cannot be compiled.

    Args:
        recipe: The model and its settings.
        result: An empty directory that becomes the artifact.
        scratch: A directory for temporary files.

    Raises:
        Exception: What transformers, torch or the C++ compiler raise.
    """
    loaded = load(
        recipe.model,
        dtype=recipe.dtype,
        device="cpu",
        block_size=recipe.block_size,
        quantization=recipe.quantization,
        kv_cache_dtype=recipe.kv_cache_dtype,
        max_model_len=recipe.max_model_len,
        adapters=recipe.adapters,
    )
    compile_captured(capture_step(loaded, recipe), result, scratch)


@torch.no_grad()
def compile_captured(captured: CapturedStep, result: Path, scratch: Path) -> None:
    """Compile a captured step, or translate it if it cannot be compiled.

    Args:
        captured: The step; its graph is changed.
        result: An empty directory that becomes the artifact.
        scratch: A directory for temporary files.

    Raises:
        Exception: What torch or the C++ compiler raise.
    """
    exported = captured.exported
    fuse(exported.graph)
    call_grouped_products(exported.graph)
    exported.graph_module.recompile()
    library, translated = make_library(exported, result, scratch)
    captured.expected.save(result / REFERENCE)
    if captured.adapted is not None:
        captured.adapted.save(result / ADAPTED)
    for file in result.iterdir():
        file.chmod(0o644)  # whatever the umask, as an artifact that others can write to is refused
    result.chmod(0o755)
    replace(
        captured.manifest, library=library, files=fingerprints(result), translated=translated
    ).write(result / MANIFEST)
    (result / MANIFEST).chmod(0o644)


def make_library(exported: ExportedProgram, result: Path, scratch: Path) -> tuple[str, str]:
    """Compile a graph, or translate it if it cannot be compiled.

    Args:
        exported: The graph.
        result: An empty directory for what is made.
        scratch: A directory for temporary files.

    Returns:
        The library's file name, and why it was translated: empty if it was compiled.

    Raises:
        Exception: It cannot be translated either. This is the compiler's error if there is one.
    """
    if not has_compiler():
        return translate(exported, result), NO_COMPILER
    try:
        return compile_graph(exported, result, scratch), ""
    except Exception as error:  # noqa: BLE001 - the compiler raises many types
        for file in result.iterdir():
            file.unlink()
        try:
            return translate(exported, result), f"it cannot be compiled: {first_line(error)}"
        except Exception:  # noqa: BLE001 - likewise
            raise error from None


def compile_graph(exported: ExportedProgram, result: Path, scratch: Path) -> str:
    """Compile a graph to a library, and return its file's name.

    Args:
        exported: The graph.
        result: An empty directory for the library and the files that it reads.
        scratch: A directory for temporary files.

    Raises:
        UncallableOperatorError: The graph has operators without a C function.
        Exception: What torch or the C++ compiler raise.
    """
    package = scratch / "step.pt2"
    operators = (
        torch.ops.octavo.paged_attention.default,
        packed_latents.OPERATOR,
        GROUPED_PRODUCT,
        packed_experts.OPERATOR,
        ADD_ADAPTERS,
        collectives.OPERATOR,
        *packed_linear.OPERATORS,
        *state_operators.OPERATORS,
    )
    shims = {operator: [_c_declaration(operator)] for operator in operators}
    options = INDUCTOR | {"aot_inductor.custom_ops_to_c_shims": shims}
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


def _c_declaration(operator: OpOverload) -> str:
    """Return the declaration of the C function that a library calls for an operator.

    It is in kernels/cpu/aoti.cpp or state_shims.cpp, or PyTorch's own.
    """
    schema = operator._schema  # noqa: SLF001 - has no public name
    arguments = [f"{C_TYPES[str(given.real_type)]} {given.name}" for given in schema.arguments]
    name = schema.name.partition("::")[2]
    arguments.append("AtenTensorHandle* result")
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join(arguments)})"


def _uncallable(directory: Path) -> list[str]:
    """Return the operators without a C function, which inductor lists beside the library."""
    listed = [json.loads(file.read_bytes()) for file in directory.glob("*.json")]
    return sorted({node["node"]["target"] for data in listed for node in data.get("nodes", [])})


def _unpack(package: Path, directory: Path) -> str:
    """Extract the library and the files that it reads from a package; return its name."""
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
