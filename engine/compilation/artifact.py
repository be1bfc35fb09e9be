"""A compiled step on disk: where it is, what is in it, how it is loaded."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from octavo.common.models.cache import cache_dir
from octavo.engine.attention.operator import current_step
from octavo.engine.compilation import cache_cleanup as upkeep
from octavo.engine.compilation.container import Container
from octavo.engine.memory import huge_pages
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.checks.self_check import Reference, SelfCheck
from octavo.engine.settings import Quantization
from octavo.kernels.integrity import (
    DamagedFileError,
    Fingerprint,
    check_trusted,
    fingerprint,
    verify,
)
from octavo.kernels.machine import cpu_identity

MANIFEST = "step.json"
REFERENCE = "reference.safetensors"
DIGEST = "sha256"
"""In a manifest: of the rest of it."""
HERE = Path(__file__).resolve().parent
SOURCES = (
    *("artifact.py", "capture.py", "experts.py", "export.py", "fusion.py", "patterns.py"),
    "rotation.py",
    *("../attention/interface.py", "../attention/operator.py"),
    *("../models/load_model.py", "../models/rope.py"),
    *("../models/checks/masks.py", "../models/checks/probe.py", "../models/checks/self_check.py"),
    *("../models/linear/fuse_linears.py", "../models/linear/packed_linear.py"),
    "../models/linear/plain_linears.py",
)
QUANTIZATION = tuple(
    f"../models/quantization/{name}"
    for name in ("calibration.py", "calibration.txt", "quantize.py")
)
KERNELS = tuple(f"../../kernels/cpu/{name}" for name in ("aoti.cpp", "linear.h", "linear.py"))
"""What a compiled step calls, and the order of the weights packed into it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what a compiled step computes, but for the machine.

    Attributes:
        model: a directory, or a hub name.
        dtype: as set, `auto` or a name.
        quantization: as set.
        block_size: tokens per block, which the kernels must support.
        max_model_len: as set; of rotary embeddings, some depend on it.
    """

    model: str
    dtype: str
    quantization: Quantization
    block_size: int
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is in an artifact, so that the model itself need not be read.

    Attributes:
        shape: the model's.
        dtype: of activations and KV cache, a name of torch's.
        library: the shared library's file name.
        files: what each file beside the manifest is recognised by, by its name.
        unquantized: as `octavo.engine.models.quantization.quantize.unquantized` has it.
    """

    shape: ModelShape
    dtype: str
    library: str
    files: Mapping[str, Fingerprint]
    unquantized: Mapping[str, float] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Save it as JSON, with the SHA-256 of what it says."""
        contents = asdict(self)
        path.write_text(json.dumps(contents | {DIGEST: _digest(_canonical(contents))}, indent=1))

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read what `write` saved.

        Raises:
            OSError: there is no such file.
            ValueError: it holds something else.
        """
        try:
            data = json.loads(path.read_bytes())
            known, found = data.pop(DIGEST), _digest(_canonical(data))
            eos = tuple(data["shape"].pop("eos_token_ids"))
            shape = ModelShape(**data["shape"], eos_token_ids=eos)
            files = {name: Fingerprint(*figures) for name, figures in data["files"].items()}
            manifest = cls(shape, data["dtype"], data["library"], files, data["unquantized"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if known != found:
            raise ValueError(f"{path} is damaged: it does not match its own SHA-256")
        return manifest


def fingerprints(directory: Path) -> dict[str, Fingerprint]:
    """Return what each file in a directory is recognised by, by its name."""
    return {file.name: fingerprint(file) for file in sorted(directory.iterdir())}


@dataclass(frozen=True, slots=True)
class Artifact:
    """The place of one compiled step in the cache.

    Attributes:
        recipe: of what.
        name: of its directory in the cache; it appears whole or not at all.
    """

    recipe: Recipe
    name: str

    @property
    def path(self) -> Path:
        """Its directory."""
        return cache_dir() / self.name


class CompiledStep:
    """A compiled step, loaded.

    Args:
        artifact: which; must exist.

    Raises:
        OSError: it is not there, one of its files is damaged, or its library cannot be loaded.
        UntrustedFileError: another user can have written one of its files.
        ValueError: its manifest is damaged.
        RuntimeError: its weights cannot be loaded.
        SelfCheckError: it does not compute what transformers computes of the model.
        AttributeError: its library is no compiled step.

    Attributes:
        manifest: what it says of the model.
    """

    def __init__(self, artifact: Artifact) -> None:
        self._hold = upkeep.hold(artifact.path, asdict(artifact.recipe))
        check_trusted(artifact.path, artifact.path / MANIFEST)
        self.manifest = Manifest.read(artifact.path / MANIFEST)
        _verify(artifact.path, self.manifest)
        # `aoti_load_package` would unpack the weights into a temporary directory at every
        # start, and leave them there.
        self._container = Container(artifact.path / self.manifest.library)
        huge_pages.collapse(self._container.constants())
        self.check(artifact)

    def check(self, artifact: Artifact) -> None:
        """Hold it to what transformers computes of the model.

        Raises:
            SelfCheckError: it computes something else.
        """
        manifest, recipe = self.manifest, artifact.recipe
        SelfCheck(
            manifest.shape,
            getattr(torch, manifest.dtype),
            torch.device("cpu"),
            block_size=recipe.block_size,
            quantization=recipe.quantization,
        ).run(self, Reference.load(artifact.path / REFERENCE))

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Runs the model within `attending`; see `octavo.engine.models.step.Step`."""
        return self._container(token_ids, positions, logit_rows, current_step())

    def most_likely(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor
    ) -> list[int]:
        """As a call, but returns the first of each row's most likely tokens."""
        return self._container.most_likely(token_ids, positions, logit_rows, current_step())


def _verify(directory: Path, manifest: Manifest) -> None:
    """Check an artifact's files, in threads: most of it is one file of hundreds of megabytes.

    Raises:
        DamagedFileError: one is not what was written, or its library is not among them.
        UntrustedFileError: another user can have written one.
    """
    if manifest.library not in manifest.files:
        raise DamagedFileError(f"{directory / manifest.library} is missing")

    def check(name: str) -> None:
        verify(directory / name, manifest.files[name])
        check_trusted(directory / name)

    with ThreadPoolExecutor() as pool:
        list(pool.map(check, manifest.files))


def locate(recipe: Recipe) -> Artifact | None:
    """Where a compiled step of this recipe, on this machine, is or would be.

    Its name is a hash of all that went into it: the model's files (by name, size and
    time of change, which is quick, and what rsync and make go by), the settings, the
    libraries' versions, the CPU, the number of threads and this code.

    Returns:
        The place, or None if the model's files are not on this machine yet.
    """
    files = _model_files(recipe.model)
    if files is None:
        return None
    sources = (*SOURCES, *KERNELS, *(QUANTIZATION if recipe.quantization != "none" else ()))
    facts = {
        "recipe": asdict(recipe) | {"model": "", **_context(recipe, files)},
        "files": [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cpu": cpu_identity(),
        "threads": torch.get_num_threads(),
        "code": [
            _digest((Path(__file__).resolve().parent / name).read_bytes()) for name in sources
        ],
    }
    key = _digest(json.dumps(facts, sort_keys=True).encode())
    return Artifact(recipe, f"{upkeep.FOLDER}/{key[:24]}")


def _context(recipe: Recipe, files: list[Path]) -> dict[str, int | None]:
    """Return the context if the rotary embedding depends on it; see `models.rope`."""
    config = next((file for file in files if file.name == "config.json"), None)
    text = config.read_text() if config else ""
    depends = any(f'"{kind}"' in text for kind in ("dynamic", "longrope", "su"))
    return {"max_model_len": recipe.max_model_len if depends else None}


def _model_files(model: str) -> list[Path] | None:
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - slow to import

        config = try_to_load_from_cache(model, "config.json")
        if not isinstance(config, str):
            return None
        directory = Path(config).parent
    return sorted(file for file in directory.iterdir() if file.is_file())


def _canonical(contents: Mapping[str, Any]) -> bytes:
    return json.dumps(contents, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
