"""Loads a model, and builds the step that runs it."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from octavo.common.models.errors import first_line
from octavo.engine import cache_cleanup
from octavo.engine.memory.cache_tensors import GIB
from octavo.engine.memory.freed import mapping_large, return_freed
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.device import choose_device
from octavo.engine.models.forward import EagerForward, Forward
from octavo.engine.models.sharding.rank_forward import RankForward
from octavo.engine.parallel.collectives import add_up, ranks_alone
from octavo.engine.parallel.world import World
from octavo.engine.settings import EngineSettings
from octavo.kernels.ops import device_warning

if TYPE_CHECKING:
    from octavo.engine.lora.targets import Targets
    from octavo.engine.models.checks.routing import Routing
    from octavo.engine.models.checks.self_check import SelfCheck
    from octavo.engine.models.load_model import LoadedModel
    from octavo.engine.models.vision import Vision

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedForward:
    """A model ready to run.

    Attributes:
        shape: The model's dimensions.
        dtype: The type of activations.
        cache_dtype: The type of the KV cache.
        kv_scales: Each layer's (key scale, value scale) of an fp8 KV cache; else None.
        device: The model's device.
        forward: The function that runs the model.
        targets: The layers that adapters may adapt; None if the model takes no adapters.
        eager: The step as transformers runs it, for prompts with images.
        vision: The part that encodes images; None if the engine reads text alone.
        kept: The cache file of its checks' outcome, if any.
    """

    shape: ModelShape
    dtype: torch.dtype
    cache_dtype: torch.dtype
    kv_scales: list[tuple[float, float]] | None
    device: torch.device
    forward: Forward
    targets: "Targets | None" = None
    eager: EagerForward | None = None
    vision: "Vision | None" = None
    kept: Path | None = None

    @property
    def compiled(self) -> bool:
        """Whether steps run traced or compiled, not operator by operator in Python."""
        if isinstance(self.forward, RankForward):
            return self.forward.compiled
        return not isinstance(self.forward, EagerForward)

    @property
    def eager_steps(self) -> int:
        """Number of steps that ran uncompiled although the model is compiled."""
        count: int = getattr(self.forward, "eager_steps", 0)  # only `JitForward` counts them
        return count


@mapping_large()
def load_forward(settings: EngineSettings, model: str, world: World | None = None) -> LoadedForward:
    """Load a model, build its step, and check that it computes the same as transformers.

    Args:
        settings: The engine's settings.
        model: The model's directory.
        world: The ranks that hold the model; all of them call this. Default: this process alone.

    Raises:
        UnsupportedModelError: The engine cannot serve the model with these settings.
        ModelError: The model cannot be read, or lacks weights.
        OSError: There is no such model.
    """
    # Imported here because transformers is slow to import.
    from octavo.engine.lora.adapted_model import adapt_loaded  # noqa: PLC0415
    from octavo.engine.models.checks.model_class import check_model_class  # noqa: PLC0415
    from octavo.engine.models.load_model import load_unchecked  # noqa: PLC0415
    from octavo.engine.models.quantization.base import unquantized_shares  # noqa: PLC0415
    from octavo.engine.models.refusals import as_unsupported  # noqa: PLC0415

    check_model_class(model)
    loaded = load_unchecked(
        model,
        dtype=settings.dtype,
        device=choose_device(settings.device).type,
        block_size=settings.block_size,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=settings.max_model_len,
        stage_layers=settings.stage_layers,
        whole_experts=settings.expert_parallel,
        world=world,
        adapters=settings.takes_adapters,
    )
    if world is not None:
        log.info("this rank's part loaded", gib=round(_size(loaded.model) / GIB, 3))
    if settings.quantization != "none":
        _warn_unquantized(unquantized_shares(loaded.model))
    with as_unsupported(model):
        targets = adapt_loaded(loaded, model, world) if settings.takes_adapters else None
        forwards = _Forwards(loaded, targets, world)
        forward = forwards.make(eager=settings.compile == "off")
    return_freed()
    cache_cleanup.prune()
    return LoadedForward(
        loaded.shape,
        loaded.dtype,
        loaded.cache_dtype,
        loaded.kv_scales,
        loaded.device,
        forward,
        targets,
        forwards.eager,
        loaded.vision,
        loaded.kept,
    )


class _Forwards:
    """Builds the step of a loaded model, and checks it."""

    def __init__(
        self, loaded: "LoadedModel", targets: "Targets | None", world: World | None
    ) -> None:
        self._loaded = loaded
        self._targets = targets
        self._world = world
        self.eager = EagerForward(loaded.model)

    def make(self, *, eager: bool) -> Forward:
        """Return the step that passed the self-check.

        Args:
            eager: Whether to run operator by operator in Python.

        Raises:
            SelfCheckError: No step passes it.
        """
        loaded = self._loaded
        has_kernels = loaded.device.type == "cpu" and device_warning(loaded.device) is None
        if not eager and has_kernels:
            forward = self._traced() or self.eager
            some_traced = not self._all(forward is self.eager)
            if some_traced and self._passes(forward):
                return self._of_all_ranks(forward)
        self._check(self.eager)
        if eager or loaded.device.type != "cuda":
            return self._of_all_ranks(self.eager)
        whole = partial(self._of_all_ranks, everywhere=True)
        return self._of_all_ranks(
            compiled_for_gpu(self.eager, loaded.device, loaded.check, whole=whole, on_all=self._all)
        )

    def _traced(self) -> Forward | None:
        """Return the traced step; None after a warning if it fails."""
        from octavo.engine.compilation.traced_forward import TracedForward  # noqa: PLC0415 - CPUs'
        from octavo.kernels import cpu  # noqa: PLC0415 - it compiles the kernels

        loaded = self._loaded
        if self._world is not None:
            assert cpu.sums is not None
            cpu.sums.set(add_up, self._world.receive_hidden, self._world.send_hidden)
        try:
            return TracedForward(
                self.eager,
                loaded.shape.vocab_size,
                loaded.dtype,
                adapters=self._targets is not None,
            )
        except Exception as error:  # noqa: BLE001 - PyTorch raises many types
            log.warning("the model runs in Python, which is slower", why=first_line(error))
            return None

    def _passes(self, forward: Forward) -> bool:
        """Return whether the steps of all ranks pass, some of them traced; else log a warning."""
        from octavo.engine.models.checks.routing import OperatorRouting  # noqa: PLC0415
        from octavo.engine.models.checks.self_check import SelfCheckError  # noqa: PLC0415
        from octavo.engine.models.experts.packed_experts import count_packed  # noqa: PLC0415

        check = self._loaded.check
        try:
            if self._all(count_packed(self._loaded.model) == len(check.expected.choices)):
                routing = None if forward is self.eager else OperatorRouting()
                self._check(forward, routing, agreed=True)
            else:  # its routing cannot be forced
                self._check(self.eager, agreed=True)
                whole = self._of_all_ranks(self.eager, everywhere=True)
                check.follow(whole)(self._of_all_ranks(forward, everywhere=True))
        except SelfCheckError as error:
            log.warning("the model runs in Python, which is slower", why=str(error))
            return False
        return True

    def _check(
        self, forward: Forward, routing: "Routing | None" = None, *, agreed: bool = False
    ) -> None:
        """Check a step, and its adapters if it takes any.

        Args:
            forward: The step.
            routing: See `LoadedModel.pass_check`.
            agreed: Whether a failure on one rank is one on all ranks. Otherwise that rank leaves.

        Raises:
            SelfCheckError: The step does not pass.
        """
        from octavo.engine.lora.self_check import TrialForward, check_adapters  # noqa: PLC0415

        agree = self._agreed if agreed else nullcontext
        loaded = self._loaded
        with agree():
            loaded.pass_check(self._of_all_ranks(forward, everywhere=True), routing)
        if self._targets is None or loaded.trial is None:
            return
        check = loaded.trial.check if routing is None else loaded.trial.check.routed(routing)
        with agree():
            trial = TrialForward(forward, self._targets, loaded.trial.scales, loaded.device)
            check_adapters(check, self._of_all_ranks(trial, everywhere=True))

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """Let a self-check fail on all ranks if it fails on one.

        Raises:
            SelfCheckError: It fails.
        """
        from octavo.engine.models.checks.self_check import SelfCheckError  # noqa: PLC0415

        failure: SelfCheckError | None = None
        try:
            yield
        except SelfCheckError as error:
            failure = error
        if not self._all(failure is None):
            raise failure or SelfCheckError("another rank's self-check failed")

    def _all(self, holds: bool) -> bool:
        """Return whether something holds on all ranks."""
        return holds if self._world is None else bool(*self._world.least(int(holds)))

    def _of_all_ranks(self, forward: Forward, *, everywhere: bool = False) -> Forward:
        """Return a step that gives all columns of logits: on rank 0, or on all ranks."""
        if self._world is None:
            return forward
        return RankForward(
            forward, self._world, self._loaded.shape.vocab_size, everywhere=everywhere
        )


def compiled_for_gpu(
    forward: EagerForward,
    device: torch.device,
    check: "SelfCheck",
    *,
    whole: Callable[[Forward], Forward] = lambda forward: forward,
    on_all: Callable[[bool], bool] = bool,
) -> Forward:
    """Compile the step; if that fails on any rank, log a warning and return it uncompiled.

    A rank's sums are operators that the compiled code calls. While a rank compiles, it sums
    nothing: ranks take their own time, and one may fail.

    Args:
        forward: The step to compile.
        device: The model's device.
        check: The self-check that `forward` has passed.
        whole: Returns a step that gives the logits of all ranks, of this rank's step.
        on_all: Returns whether something holds on all ranks.
    """
    from octavo.engine.compilation.jit import JitForward  # noqa: PLC0415 - for a GPU only

    compiled: Forward = forward

    def compile_alone() -> None:
        nonlocal compiled
        with ranks_alone():
            compiled = JitForward(forward, device)

    def compare() -> None:
        check.follow(whole(forward))(whole(compiled))

    for step in (compile_alone, compare):
        why = None
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the compiler raises many types
            why = first_line(error)
        if not on_all(why is None):
            why = why or "another rank could not compile it"
            log.warning("the model cannot be compiled: it runs uncompiled", error=why)
            return forward
    return compiled


def _size(model: torch.nn.Module) -> int:
    """Return the bytes of a model's weights."""
    return sum(tensor.nbytes for tensor in itertools.chain(model.parameters(), model.buffers()))


def _warn_unquantized(shares: Mapping[str, float]) -> None:
    """Log a warning about layers that are not quantized, with their shares of the weights."""
    if shares:
        percent = {name: round(100 * share) for name, share in shares.items()}
        log.warning("some layers are not quantized", percent_of_weights=percent)
