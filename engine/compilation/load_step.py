"""Loads a step from settings: the compiled one if there is one, else the eager one."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import torch

from octavo.common import resources
from octavo.common.models import cache as model_cache
from octavo.common.models.errors import first_line
from octavo.engine.compilation import (
    Artifact,
    CompiledStep,
    Compiler,
    Recipe,
    cache_cleanup,
    locate,
)
from octavo.engine.compilation.background import LOAD_ERRORS, CompileProgress
from octavo.engine.compilation.rank_compiler import (
    RankCompiler,
    compile_part,
    load_together,
    remove_unusable,
)
from octavo.engine.memory.cache_tensors import GIB
from octavo.engine.memory.freed import mapping_large, return_freed
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.checks.self_check import SelfCheck
from octavo.engine.models.device import choose_device
from octavo.engine.models.sharding.rank_step import RankStep
from octavo.engine.models.step import EagerStep, Step
from octavo.engine.ranks.world import World
from octavo.engine.settings import EngineSettings
from octavo.kernels.integrity import UntrustedFileError, check_trusted
from octavo.kernels.ops import device_warning

COMPILER_BASE = 3 * GIB // 4
"""The compiler's memory without a model: PyTorch and its compilers, in bytes."""
COMPILER_COPIES = 4
"""The compiler's further memory, in copies of the loaded weights. Measured: 2.7 GiB for 0.50 GiB in
float32, 6.7 GiB for 1.48 GiB."""
COMPILER_SHARE = 0.75
"""Maximum share of the free memory for the compiler; the KV cache and swap space need the rest."""

if TYPE_CHECKING:
    from octavo.engine.adapters.targets import Targets

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class LoadedStep:
    """A model ready to run.

    Attributes:
        shape: The model's dimensions.
        dtype: Of activations.
        cache_dtype: Of the KV cache.
        kv_scales: Each layer's (key scale, value scale) of an fp8 KV cache; else None.
        device: Where it runs.
        compiler: Compiles a faster step in the background; else None.
        targets: The layers that adapters may adapt; None if it takes no adapters.
        rank_compiler: As `compiler`, of one of several ranks: all begin to use what they made at
            the same step, by `switch`.
    """

    shape: ModelShape
    dtype: torch.dtype
    cache_dtype: torch.dtype
    kv_scales: list[tuple[float, float]] | None
    device: torch.device
    compiler: Compiler | None
    _step: Step
    targets: "Targets | None" = None
    rank_compiler: RankCompiler | None = None

    @property
    def step(self) -> Step:
        """The compiled step once it is ready, which drops the eager one."""
        if self.compiler is not None and (compiled := self.compiler.step) is not None:
            self.compiler = None
            own = compiled.targets if isinstance(compiled, CompiledStep) else None
            if own == self.targets:  # adapters are laid out for these
                self._step = compiled
                return_freed()  # the eager step's weights
            else:
                log.warning("the compiled step takes other adapters: it is not used")
        return self._step

    @property
    def can_switch(self) -> bool:
        """Whether all ranks have a compiled step that they do not use yet."""
        return self.rank_compiler is not None and self.rank_compiler.step is not None

    def switch(self) -> None:
        """Use this rank's compiled step from now on, which all ranks have."""
        if self.rank_compiler is not None:
            self.rank_compiler.join()  # it may lag behind that of rank 0
            assert self.rank_compiler.step is not None
            self._step, self.rank_compiler = self.rank_compiler.step, None
            return_freed()

    @property
    def reserved_bytes(self) -> int:
        """The host's bytes that are free, but that the compiler will need while it runs."""
        compiler = self.compiler or self.rank_compiler
        if compiler is None or self.compiling is None:
            return 0
        return compiler.needed_bytes

    @property
    def compiling(self) -> CompileProgress | None:
        """The progress of the compiler, if it runs."""
        compiler = self.compiler or self.rank_compiler
        return None if compiler is None else compiler.progress

    @property
    def compiled(self) -> bool:
        """Whether steps run compiled now."""
        step = self.step
        return step.compiled if isinstance(step, RankStep) else not isinstance(step, EagerStep)

    @property
    def eager_steps(self) -> int:
        """Number of steps that ran uncompiled although the model is compiled."""
        count: int = getattr(self._step, "eager_steps", 0)  # of a `JitStep`
        return count


@mapping_large()
def load_step(settings: EngineSettings, model: str, world: World | None = None) -> LoadedStep:
    """Load a model, or its compiled step.

    Args:
        settings: The engine's settings.
        model: Its directory.
        world: The ranks that hold the model, all of which call this. Default: this process alone.

    Raises:
        UnsupportedModelError: The engine cannot serve the model, or not with these settings.
        ModelError: The model cannot be read, or lacks weights.
        OSError: There is no such model.
    """
    recipe = Recipe(
        model,
        settings.dtype,
        settings.quantization,
        settings.block_size,
        settings.max_model_len,
        rank=0 if world is None else world.rank,
        ranks=1 if world is None else world.size,
        adapters=settings.takes_adapters,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    device = choose_device(settings.device)
    compiles = _on_all(_compiles_ahead(settings, device) and _trusts_cache(), world)
    artifact = locate(recipe) if compiles else None
    made = _on_all(artifact is not None and artifact.path.is_dir(), world)
    compiled = _load_compiled(artifact, world) if artifact and made else None
    if compiled is not None:
        return compiled
    # Imported here because transformers is slow to import, and a compiled step needs none of it.
    from octavo.engine.adapters.adapted_model import adapt_loaded  # noqa: PLC0415
    from octavo.engine.models.checks.checkpoint import check_weights  # noqa: PLC0415
    from octavo.engine.models.checks.model_class import check_model_class  # noqa: PLC0415
    from octavo.engine.models.load_model import load  # noqa: PLC0415
    from octavo.engine.models.quantization.base import unquantized_shares  # noqa: PLC0415

    check_model_class(model)
    check_weights(model)
    loaded = load(
        model,
        dtype=settings.dtype,
        device=device.type,
        block_size=settings.block_size,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=settings.max_model_len,
        world=world,
        adapters=settings.takes_adapters,
    )
    if world is not None:
        log.info("this rank's part loaded", gib=round(_size(loaded.model) / GIB, 3))
    targets = adapt_loaded(loaded, model)[0] if settings.takes_adapters else None
    if settings.quantization != "none":
        _warn_unquantized(unquantized_shares(loaded.model))
    artifact = artifact or (locate(recipe) if compiles else None)  # the model's files exist now
    size, ranks_here = _size(loaded.model), 1 if world is None else world.place.local_size
    # A compiled step calls the kernels, and needs their compiler.
    compiles = _on_all(
        artifact is not None
        and settings.compile != "off"
        and device_warning(loaded.device) is None
        and _room_to_compile(size, ranks_here),
        world,
    )
    needed = ranks_here * compiler_bytes(size)
    eager = EagerStep(loaded.model)
    if world is not None:
        found = LoadedStep(
            loaded.shape,
            loaded.dtype,
            loaded.cache_dtype,
            loaded.kv_scales,
            loaded.device,
            None,
            RankStep(eager, world, loaded.shape.vocab_size),
        )
        if artifact and compiles:
            found.rank_compiler = compile_part(loaded, artifact, size, needed, world)
        if found.rank_compiler and settings.compile == "wait":
            found.rank_compiler.join()
            if found.can_switch:  # on all ranks or on none
                found.switch()
        return found
    compiler = Compiler(artifact, size, needed) if artifact and compiles else None
    if compiler and settings.compile == "wait":
        compiler.join()
    jit = loaded.device.type == "cuda" and settings.compile != "off"
    step = compiled_for_gpu(eager, loaded.device, loaded.check) if jit else eager
    return LoadedStep(
        loaded.shape,
        loaded.dtype,
        loaded.cache_dtype,
        loaded.kv_scales,
        loaded.device,
        compiler,
        step,
        targets,
    )


def compiled_for_gpu(step: EagerStep, device: torch.device, check: SelfCheck) -> Step:
    """Return the step compiled; if that fails, log a warning and return it as it is.

    Args:
        step: The step to compile.
        device: Where it is.
        check: The self-check, which `step` has passed.
    """
    from octavo.engine.compilation.jit import JitStep  # noqa: PLC0415 - for a GPU only

    try:
        compiled = JitStep(step, device)
        check.follow(step)(compiled)
    except Exception as error:  # noqa: BLE001 - the compiler raises many types
        log.warning("the model cannot be compiled: it runs uncompiled", error=first_line(error))
        return step
    return compiled


def _compiles_ahead(settings: EngineSettings, device: torch.device) -> bool:
    """Return whether the step is compiled ahead of time.

    Settings that a CPU does not support must be refused by `load`, compiled or not.
    """
    return settings.compile != "off" and device.type == "cpu"


def _room_to_compile(size: int, processes: int = 1) -> bool:
    """Return whether the free memory suffices to compile a model; log a warning if it does not.

    Args:
        size: The bytes of its weights, or of a rank's.
        processes: How many processes of this machine compile at once.
    """
    available, needed = resources.memory().available, processes * compiler_bytes(size)
    if needed <= COMPILER_SHARE * available:
        return True
    log.warning(
        "too little memory to compile the model, which stays slower",
        needed_gib=round(needed / COMPILER_SHARE / GIB, 1),
        available_gib=round(available / GIB, 1),
        hint="give this process more memory, or set --compile off",
    )
    return False


def compiler_bytes(size: int) -> int:
    """Return the bytes that compiling takes at its peak, for weights of `size` bytes."""
    return COMPILER_BASE + COMPILER_COPIES * size


def _size(model: torch.nn.Module) -> int:
    """Return the bytes of a model's weights."""
    return sum(tensor.nbytes for tensor in itertools.chain(model.parameters(), model.buffers()))


def _warn_unquantized(shares: Mapping[str, float]) -> None:
    """Log a warning about layers that are not quantized, with their shares of the weights."""
    if shares:
        percent = {name: round(100 * share) for name, share in shares.items()}
        log.warning("some layers are not quantized", percent_of_weights=percent)


def _trusts_cache() -> bool:
    """Return whether no other user can write compiled steps; if not, log a warning."""
    try:
        check_trusted(model_cache.cache_dir() / cache_cleanup.FOLDER)
    except FileNotFoundError:
        return True
    except UntrustedFileError as error:
        log.warning("the model stays uncompiled, which is slower", error=str(error))
        return False
    return True


def _on_all(condition: bool, world: World | None) -> bool:
    """Return whether a condition holds on all ranks."""
    return condition if world is None else world.all_have(condition)


def _load_compiled(artifact: Artifact, world: World | None) -> LoadedStep | None:
    """Load an artifact; if it cannot be loaded, warn, remove it and return None."""
    if world is not None:
        own = load_together(artifact, world)
        if own is None:
            return None
        ranks = RankStep(own, world, own.manifest.shape.vocab_size)
        return _loaded_step(own, ranks)
    try:
        step = CompiledStep(artifact)
    except LOAD_ERRORS as error:
        remove_unusable(artifact, error)
        return None
    return _loaded_step(step, step)


def _loaded_step(compiled: CompiledStep, step: Step) -> LoadedStep:
    """Return an artifact's step, and what runs it, as a model ready to run."""
    manifest = compiled.manifest
    _warn_unquantized(manifest.unquantized)
    return LoadedStep(
        manifest.shape,
        getattr(torch, manifest.dtype),
        getattr(torch, manifest.cache_dtype),
        manifest.kv_scales,
        torch.device("cpu"),
        None,
        step,
        compiled.targets,
    )
