"""Simulated CUDA graphs on the CPU, which refuse steps that a graph would compute wrongly.

A graph replays the recorded kernels with the same numbers and addresses, and runs no Python. A
simulated replay runs the step again: each operator and kernel must have the recorded arguments.
Only the contents of memory may differ.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from octavo.engine.attention import operator, state_operators
from octavo.engine.execution.cuda_graphs import WARM_UPS
from octavo.engine.models.experts import grouped_experts, quantized_experts
from octavo.engine.models.linear import quantized_linear


class HostCopyError(AssertionError):
    """A step copies between host and GPU, or reads a value."""


class NewVariantError(AssertionError):
    """Triton would compile a kernel during recording or replay."""


class OtherWorkError(AssertionError):
    """A step launches other kernels than the recorded ones, or with other arguments."""


class KeptMemoryError(AssertionError):
    """Python keeps a tensor in the graphs' memory pool, which other graphs overwrite."""


octavo = torch.ops.octavo
INSIDE: dict[Any, Callable[..., torch.Tensor]] = {
    octavo.paged_attention.default: operator._attend,
    octavo.quantized_linear.default: quantized_linear._quantized_linear,
    octavo.fp8_linear.default: quantized_linear._fp8_linear,
    octavo.quantized_experts.default: quantized_experts._quantized_experts,
    octavo.grouped_experts.default: grouped_experts._on_gpu,
    octavo.causal_conv.default: state_operators._causal_conv,
    octavo.ssd.default: state_operators._ssd,
    octavo.gated_delta.default: state_operators._gated_delta,
    octavo.selective_scan.default: state_operators._selective_scan,
}
"""Operators that launch kernels, and their functions on a GPU."""


def reads_values(called: Any, args: Any) -> bool:
    """Return whether an operator synchronizes: the host reads a tensor's values."""
    aten = torch.ops.aten
    if called is aten.index.Tensor:
        return any(each is not None and each.dtype == torch.bool for each in args[1])
    return (
        called is aten._local_scalar_dense.default or torch.Tag.dynamic_output_shape in called.tags
    )


class NoHostCopies(TorchFunctionMode):
    """Refuses functions that copy between host and GPU; on the CPU, where tests run, none does."""

    REFUSED = frozenset(
        {
            *(torch.tensor, torch.as_tensor, torch.from_numpy),
            *(torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist),
        }
    )

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self.REFUSED:
            raise HostCopyError(function.__name__)
        return function(*args, **(kwargs or {}))


class Trace(TorchDispatchMode):
    """Lists operators and kernel launches.

    Attributes:
        work: Names and arguments, in order. An intermediate tensor is listed by its shape, any
            other by its address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Any] = []
        self._made: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, called, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if called in INSIDE:  # its own operators and launches are listed
            with self, NoHostCopies():
                return INSIDE[called](*args, **kwargs)
        if reads_values(called, args):
            raise HostCopyError(str(called))
        given = {self._storage(each) for each in tree_leaves((args, kwargs))}
        out = called(*args, **kwargs)
        if not called.is_view:
            self.note(str(called), args, kwargs)
        for each in tree_leaves(out):
            if (address := self._storage(each)) not in given:
                self._made[address] = weakref.ref(each.untyped_storage())
        return out

    def note(self, name: str, *arguments: Any) -> None:
        """List an operator or launch."""
        self.work.append((name, tree_map(self._described, arguments)))

    def kept(self, output: torch.Tensor) -> list[int]:
        """Return the addresses of intermediate tensors that are still alive."""
        gc.collect()
        alive = [address for address, made in self._made.items() if made() is not None]
        return [address for address in alive if address != self._storage(output)]

    @staticmethod
    def _storage(each: Any) -> int:
        return each.untyped_storage().data_ptr() if isinstance(each, torch.Tensor) else 0

    def _described(self, each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return repr(each)
        address = self._storage(each)
        place = 0 if address in self._made else each.data_ptr()
        return place, tuple(each.shape), each.stride(), each.dtype


class Frozen:
    """The recorder.

    Args:
        variants: The variants of kernels that were compiled so far.
        watch: Sets the function that gets each launch: its kernel's name and its arguments.

    Attributes:
        replayed: Number of replays.
        recordings: The work of each recording, as in `Trace`.
    """

    def __init__(
        self, variants: set[Any], watch: Callable[[Callable[..., None] | None], None]
    ) -> None:
        self.replayed = 0
        self.recordings: list[list[Any]] = []
        self._variants, self._watch = variants, watch

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record work on inputs at fixed addresses; return its replay function."""
        for _ in range(WARM_UPS):
            work()
        recorded, _ = self._trace(work)
        self.recordings.append(recorded)

        def replay() -> torch.Tensor:
            self.replayed += 1
            found, output = self._trace(work)
            for expected, actual in zip(recorded, found, strict=False):
                if expected != actual:
                    raise OtherWorkError(f"the recording has {expected}, the replay {actual}")
            if len(found) != len(recorded):
                raise OtherWorkError(
                    f"the recording has {len(recorded)} launches, the replay {len(found)}"
                )
            return output

        return replay

    def _trace(self, work: Callable[[], torch.Tensor]) -> tuple[list[Any], torch.Tensor]:
        trace, known = Trace(), len(self._variants)
        self._watch(trace.note)
        try:
            with trace, NoHostCopies():
                output = work()
        finally:
            self._watch(None)
        if len(self._variants) != known:
            raise NewVariantError(f"{len(self._variants) - known} new variants")
        if kept := trace.kept(output):
            raise KeptMemoryError(f"{len(kept)} tensors")
        return trace.work, output
