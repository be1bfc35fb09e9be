"""A compiled step on disk: its place, its contents and how to load it."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from octavo.common.models.cache import cache_dir
from octavo.common.models.files import CONFIG
from octavo.common.models.quantized import find_statement
from octavo.engine.adapters.targets import Targets
from octavo.engine.adapters.trial import TrialStep, check_adapters
from octavo.engine.attention.operator import current_step
from octavo.engine.compilation import cache_cleanup
from octavo.engine.compilation.container import Container
from octavo.engine.compilation.cpp_compiler import has_compiler
from octavo.engine.compilation.translated import TranslatedModel
from octavo.engine.model_shape import LayerShape, ModelShape, StateShape
from octavo.engine.models.checks.reference import Reference
from octavo.engine.models.checks.routing import OperatorRouting
from octavo.engine.models.checks.self_check import SelfCheck
from octavo.engine.models.step import Step
from octavo.kernels import huge_pages
from octavo.kernels.integrity import (
    DamagedFileError,
    Fingerprint,
    check_trusted,
    fingerprint,
    verify,
)
from octavo.kernels.machine import cpu_identity
from octavo.kernels.ops import kernel_path

log = structlog.get_logger(__name__)

COST = "SmolLM2: none in bfloat16, up to a quarter more time per step in float32"
HINT = "to compile it, install g++ and start again"
NO_MASKS: Mapping[int, np.ndarray] = {}
MANIFEST = "step.json"
REFERENCE, ADAPTED = "reference.safetensors", "adapted.safetensors"
"""What the self-check compares with, without and with the trial adapter."""
DIGEST = "sha256"
"""A manifest's key for the digest of its other keys."""
HERE = Path(__file__).resolve().parent
SOURCES = (
    *("artifact.py", "capture.py", "captured.py", "experts.py", "export.py", "fusion.py"),
    *("rotation.py", "translation.py"),
    *("../adapters/adapted_model.py", "../adapters/targets.py", "../adapters/trial.py"),
    *("../attention/interface.py", "../attention/latent.py", "../attention/operator.py"),
    "../attention/packed_latents.py",
    *("../models/load_model.py", "../models/rope.py", "../models/step.py"),
    *("../models/checks/masks.py", "../models/checks/probe.py", "../models/checks/routing.py"),
    *("../models/checks/module_routing.py", "../models/checks/reference.py"),
    *("../models/checks/self_check.py", "../models/checks/structure.py"),
    *("../models/checks/trial_adapter.py", "../models/checks/trial_matrices.py"),
    *("../models/checks/widened.py", "../models/linear/adapted_layers.py"),
    *("../models/linear/fuse_linears.py", "../models/linear/packed_linear.py"),
    "../models/linear/plain_linears.py",
    *("../models/experts/expert_layer.py", "../models/experts/interface.py"),
    *("../models/experts/packed_experts.py", "../../kernels/activation.py"),
    *("../models/sharding/load_shard.py", "../models/sharding/plan.py"),
    *("../models/sharding/sharded_layers.py", "../ranks/collectives.py"),
    *("../../kernels/cpu/aoti.cpp", "../../kernels/cpu/operators.cpp"),
    *("../../kernels/cpu/blocks.h", "../../kernels/cpu/blocks.py"),
    "../../kernels/cpu/linear_blocks.cpp",
    *("../../kernels/cpu/experts.cpp", "../../kernels/cpu/experts.py"),
    *("../../kernels/cpu/latent.py", "../../kernels/cpu/latent_attention.cpp"),
    *("../../kernels/cpu/linear.h", "../../kernels/cpu/linear.py", "../../kernels/cpu/low_rank.h"),
    *("../../kernels/cpu/nibbles.h", "../../kernels/cpu/words.h"),
)
"""Files that decide what a compiled step computes; see `locate`."""
QUANTIZATION = "../models/quantization"
"""Folder of further such files, if the weights are quantized; also in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings that decide what a compiled step computes.

    Attributes:
        model: A directory or a hub name.
        dtype: The value of --dtype.
        quantization: The value of --quantization.
        block_size: Tokens per block.
        max_model_len: The value of --max-model-len, on which some rotary embeddings depend.
        rank: The number of the rank whose part it computes.
        ranks: How many ranks hold the model.
        adapters: Whether it applies LoRA adapters.
        kv_cache_dtype: The value of --kv-cache-dtype, which its self-check needs.
    """

    model: str
    dtype: str
    quantization: str
    block_size: int
    max_model_len: int | None = None
    rank: int = 0
    ranks: int = 1
    adapters: bool = False
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of an artifact, so that the model itself need not be read.

    Attributes:
        shape: The model's dimensions.
        dtype: Of activations, a name in torch.
        cache_dtype: Of the KV cache, likewise.
        library: The file name of the shared library, or of the TorchScript module.
        files: The fingerprint of each other file, by its name.
        tolerance: The quantization's tolerance in the self-check.
        unquantized: The result of `unquantized_shares`.
        translated: Why the step was translated to TorchScript, not compiled; empty if compiled.
        targets: The layers that adapters may adapt; see `Targets.to_json`. None if it applies none.
        trial: The scales of the trial adapter's layers, by name.
        kv_scales: Each layer's (key scale, value scale) of an fp8 KV cache; else None.
    """

    shape: ModelShape
    dtype: str
    cache_dtype: str
    library: str
    files: Mapping[str, Fingerprint]
    tolerance: float = 0.0
    unquantized: Mapping[str, float] = field(default_factory=dict)
    translated: str = ""
    targets: Mapping[str, Any] | None = None
    trial: Mapping[str, float] = field(default_factory=dict)
    kv_scales: list[tuple[float, float]] | None = None

    def write(self, path: Path) -> None:
        """Save it as JSON, with a SHA-256 of its contents."""
        contents = asdict(self)
        path.write_text(json.dumps(contents | {DIGEST: _digest(_canonical(contents))}, indent=1))

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read a file that `write` saved.

        Raises:
            OSError: There is no such file.
            ValueError: The file is damaged.
        """
        try:
            data = json.loads(path.read_bytes())
            known, found = data.pop(DIGEST), _digest(_canonical(data))
            eos = tuple(data["shape"].pop("eos_token_ids"))
            layers = tuple(LayerShape(**layer) for layer in data["shape"].pop("layers"))
            states = tuple(
                StateShape(one["rows"], tuple(one["row_shape"]), one["full_precision"])
                for one in data["shape"].pop("states")
            )
            data["shape"] = ModelShape(layers, **data["shape"], eos_token_ids=eos, states=states)
            data["files"] = {name: Fingerprint(*values) for name, values in data["files"].items()}
            if scales := data["kv_scales"]:
                data["kv_scales"] = [(key, value) for key, value in scales]
            manifest = cls(**data)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if known != found:
            raise ValueError(f"{path} is damaged: it does not match its own SHA-256")
        return manifest


def fingerprints(directory: Path) -> dict[str, Fingerprint]:
    """Return the fingerprint of each file in a directory, by its name."""
    return {file.name: fingerprint(file) for file in sorted(directory.iterdir())}


@dataclass(frozen=True, slots=True)
class Artifact:
    """The place of one compiled step in the cache.

    Attributes:
        recipe: What it was compiled from.
        name: Its directory in the cache, which appears complete or not at all.
    """

    recipe: Recipe
    name: str

    @property
    def path(self) -> Path:
        """The artifact's directory."""
        return cache_dir() / self.name


class CompiledStep:
    """A compiled step, loaded.

    Args:
        artifact: The artifact to load.
        checked: Whether to run the self-check, which one of several ranks cannot alone.

    Raises:
        OSError: It is missing, one of its files is damaged, or its library cannot be loaded.
        UntrustedFileError: Another user may have written one of its files.
        ValueError: Its manifest is damaged.
        RuntimeError: Its weights cannot be loaded.
        SelfCheckError: Its logits are not those of transformers.
        AttributeError: Its library is not a compiled step.

    Attributes:
        manifest: The artifact's contents.
        targets: The layers that adapters may adapt; None if it applies none.
    """

    def __init__(self, artifact: Artifact, *, checked: bool = True) -> None:
        self._artifact = artifact
        self._hold = cache_cleanup.hold(artifact.path, asdict(artifact.recipe))
        check_trusted(artifact.path, artifact.path / MANIFEST)
        self.manifest = Manifest.read(artifact.path / MANIFEST)
        own = self.manifest.targets
        self.targets = None if own is None else Targets.from_json(own)
        _verify(artifact.path, self.manifest)
        # `aoti_load_package` would unpack the weights into a temporary directory at every start,
        # and leave them there.
        load = TranslatedModel if self.manifest.translated else Container
        self._container = load(
            artifact.path / self.manifest.library, getattr(torch, self.manifest.dtype)
        )
        huge_pages.collapse(self._container.constants())
        if checked:
            self.check(self)
        if why := self.manifest.translated:
            log.info("the model runs translated, not compiled", why=why, cost=COST, hint=HINT)

    def check(self, step: Step) -> None:
        """Run the self-check.

        Args:
            step: What returns the logits of all tokens: this step, or this and those of the other
                ranks.

        Raises:
            SelfCheckError: Its logits are not those of transformers.
        """
        device = torch.device("cpu")
        check = SelfCheck(
            Reference.load(self._artifact.path / REFERENCE),
            self.manifest.shape,
            getattr(torch, self.manifest.dtype),
            device,
            block_size=self._artifact.recipe.block_size,
            tolerance=self.manifest.tolerance,
            cache_dtype=getattr(torch, self.manifest.cache_dtype),
            kv_scales=self.manifest.kv_scales,
            routing=OperatorRouting(),
        )
        check(step)
        if self.targets is not None:
            adapted = TrialStep(step, self.targets, self.manifest.trial, device)
            expected = Reference.load(self._artifact.path / ADAPTED)
            check_adapters(check.against(expected), adapted)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Run the model within `attending` and `applying`; see `octavo.engine.models.step`."""
        return self._container(token_ids, positions, logit_rows, current_step())

    def most_likely(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        masks: Mapping[int, np.ndarray] = NO_MASKS,
    ) -> list[int]:
        """Run the model within `attending`; return each row's most likely token.

        Args:
            token_ids: As for calls, like the next two.
            positions: Likewise.
            logit_rows: Likewise.
            masks: Of the rows whose tokens are masked: `[words]` int32, as for
                `octavo.kernels.ops.mask_logits`.

        Returns:
            Of the tokens that are allowed; the first on a tie.
        """
        within = current_step()
        return self._container.most_likely(token_ids, positions, logit_rows, within, masks)


def _verify(directory: Path, manifest: Manifest) -> None:
    """Check an artifact's files, in threads, as they may have hundreds of megabytes.

    Raises:
        DamagedFileError: A file has changed since it was written, or the library is missing.
        UntrustedFileError: Another user may have written a file.
    """
    if manifest.library not in manifest.files:
        raise DamagedFileError(f"{directory / manifest.library} is missing")

    def check(name: str) -> None:
        verify(directory / name, manifest.files[name])
        check_trusted(directory / name)

    with ThreadPoolExecutor() as pool:
        list(pool.map(check, manifest.files))


def locate(recipe: Recipe) -> Artifact | None:
    """Return the artifact of this recipe on this machine, whether it exists or not.

    Its name is a hash of everything that it depends on: the model's files (by name, size and time
    of change, like rsync and make), the settings, the libraries' versions, the CPU, the number of
    threads, whether there is a C++ compiler, and this code.

    Returns:
        The artifact, or None if the model's files are not on this machine yet.
    """
    files = _model_files(recipe.model)
    if files is None:
        return None
    code = [HERE / name for name in SOURCES]
    if recipe.quantization != "none" or _is_quantized(files):
        code += sorted(file for file in (HERE / QUANTIZATION).rglob("*") if file.suffix == ".py")
    facts = {
        "recipe": asdict(recipe) | {"model": "", **_context(recipe, files)},
        "files": [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cpu": cpu_identity(),
        "kernels": kernel_path(torch.device("cpu")),  # on which the layout of weights depends
        "threads": torch.get_num_threads(),
        "compiled": has_compiler(),
        "code": [_digest(file.read_bytes()) for file in code],
    }
    key = _digest(json.dumps(facts, sort_keys=True).encode())
    return Artifact(recipe, f"{cache_cleanup.FOLDER}/{key[:24]}")


def _context(recipe: Recipe, files: list[Path]) -> dict[str, int | None]:
    """Return the context if the rotary embedding depends on it; see `rope.py`."""
    config = next((file for file in files if file.name == "config.json"), None)
    text = config.read_text() if config else ""
    depends = any(f'"{kind}"' in text for kind in ("dynamic", "longrope", "su"))
    return {"max_model_len": recipe.max_model_len if depends else None}


def _is_quantized(files: list[Path]) -> bool:
    """Return whether a model's own weights are quantized."""
    config = next((file for file in files if file.name == CONFIG), None)
    return config is not None and find_statement(config.parent) is not None


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
