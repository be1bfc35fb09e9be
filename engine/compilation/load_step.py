"""From settings to a step that can run: compiled if that has been done, else eager."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    locate,
)
from octavo.engine.compilation import (
    cache_cleanup as upkeep,
)
from octavo.engine.memory.cache_tensors import GIB
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.checks.self_check import SelfCheckError
from octavo.engine.models.step import EagerStep, Step
from octavo.engine.settings import EngineSettings
from octavo.kernels.integrity import UntrustedFileError, check_trusted
from octavo.kernels.ops import cpu_warning

COMPILER_COPIES = 4

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class LoadedStep:
    """A model ready to run.

    Attributes:
        shape: the model's figures.
        dtype: of activations.
        cache_dtype: of the KV cache.
        kv_scales: each layer's (key scale, value scale), where that is fp8.
        device: where it runs.
        compiler: at work on a faster step, where there is one to be had.
    """

    shape: ModelShape
    dtype: torch.dtype
    cache_dtype: torch.dtype
    kv_scales: list[tuple[float, float]] | None
    device: torch.device
    compiler: Compiler | None
    _step: Step

    @property
    def step(self) -> Step:
        """The fastest step there is by now; the eager one is dropped once it is not."""
        if self.compiler is not None and self.compiler.step is not None:
            self._step, self.compiler = self.compiler.step, None
        return self._step

    @property
    def compiled(self) -> bool:
        """Whether steps run compiled by now."""
        return not isinstance(self.step, EagerStep)

    @property
    def eager_steps(self) -> int:
        """How many steps ran uncompiled although the model is compiled."""
        count: int = getattr(self._step, "eager_steps", 0)  # which a `JitStep` has
        return count


def load_step(settings: EngineSettings, model: str) -> LoadedStep:
    """Loads a model, or what was compiled of it.

    Args:
        settings: the engine's.
        model: a directory or a hub name.

    Raises:
        UnsupportedModelError: the model cannot be served so.
        ModelError: it cannot be read, or lacks weights.
        OSError: there is no such model.
    """
    recipe = Recipe(
        model,
        settings.dtype,
        settings.quantization,
        settings.block_size,
        settings.max_model_len,
    )
    on_cpu = settings.device == "cpu" or not torch.cuda.is_available()
    # What a CPU cannot do must be refused, compiled or not.
    compiles = settings.compile != "off" and on_cpu and settings.kv_cache_dtype == "auto"
    compiles = compiles and _trusts_cache()
    artifact = locate(recipe) if compiles else None
    if artifact and artifact.path.is_dir() and (compiled := _load_compiled(artifact)):
        return compiled
    from octavo.engine.models.checks.checkpoint import check_weights  # noqa: PLC0415 - likewise below
    from octavo.engine.models.load_model import load  # noqa: PLC0415 - a compiled step does without

    check_weights(model)
    loaded = load(
        model,
        dtype=settings.dtype,
        device=settings.device,
        block_size=settings.block_size,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=settings.max_model_len,
    )
    if settings.quantization != "none":
        from octavo.engine.models.quantization.quantize import unquantized  # noqa: PLC0415 - likewise

        _warn_unquantized(unquantized(loaded.model))
    artifact = artifact or (locate(recipe) if compiles else None)  # its files are here by now
    # A compiled step calls the kernels, and takes the compiler that they take.
    compiles = artifact is not None and cpu_warning() is None and _room_to_compile(loaded.model)
    compiler = Compiler(artifact) if artifact and compiles else None
    if compiler and settings.compile == "wait":
        compiler.join()
    eager = EagerStep(loaded.model)
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
    )


def compiled_for_gpu(step: EagerStep, device: torch.device, check: Callable[[Step], None]) -> Step:
    """The step compiled; as it is, and a word in the log, if that cannot be done.

    Args:
        step: to compile.
        device: where it is.
        check: raises of a step that does not compute what it should.
    """
    from octavo.engine.compilation.jit import JitStep  # noqa: PLC0415 - a CPU does without

    try:
        compiled = JitStep(step, device)
        check(compiled)
    except Exception as error:  # noqa: BLE001 - the compiler has many ways to say so
        log.warning("the model runs uncompiled: it cannot be compiled", error=first_line(error))
        return step
    return compiled


def _room_to_compile(model: torch.nn.Module) -> bool:
    """Whether memory allows for it: the compiler holds the weights three times over."""
    weights = itertools.chain(model.parameters(), model.buffers())
    size = sum(tensor.nbytes for tensor in weights)
    available = resources.memory().available
    if COMPILER_COPIES * size <= available:
        return True
    log.warning(
        "too little memory to compile the model",
        needed_gib=round(COMPILER_COPIES * size / GIB, 1),
        available_gib=round(available / GIB, 1),
    )
    return False


def _warn_unquantized(shares: Mapping[str, float]) -> None:
    """Warn of layers that --quantization left as they are, by their shares of the weights."""
    if shares:
        percent = {name: round(100 * share) for name, share in shares.items()}
        log.warning("--quantization left some layers as they are", percent_of_weights=percent)


def _trusts_cache() -> bool:
    """Return whether nobody else can put compiled steps into the cache; warn if not."""
    try:
        check_trusted(model_cache.cache_dir() / upkeep.FOLDER)
    except FileNotFoundError:
        return True
    except UntrustedFileError as error:
        log.warning("the model stays uncompiled, and slower", error=str(error))
        return False
    return True


def _load_compiled(artifact: Artifact) -> LoadedStep | None:
    """Load an artifact; if it cannot be loaded, warn, remove it and return None."""
    try:
        step = CompiledStep(artifact)
    except (OSError, ValueError, RuntimeError, AttributeError, SelfCheckError) as error:
        log.warning("a compiled step cannot be loaded: it is compiled again", error=str(error))
        model_cache.remove(artifact.name)
        return None
    manifest = step.manifest
    _warn_unquantized(manifest.unquantized)
    dtype = getattr(torch, manifest.dtype)
    return LoadedStep(manifest.shape, dtype, dtype, None, torch.device("cpu"), None, step)
