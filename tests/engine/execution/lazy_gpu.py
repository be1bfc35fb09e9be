"""A simulated GPU on the CPU, whose streams run as late as their events allow.

The current stream queues each operator and kernel that uses the simulated GPU's memory. It runs
them when the host synchronizes with a later event, or when a stream that the host synchronizes with
waits for them. With `eagerness`, it also runs some of them earlier, at random. Uninitialized and
freed memory is poisoned: GPU memory in the stream's order, pinned memory after the copies that
PyTorch knows of. So a missing wait changes the results, and a synchronization of the host raises.

The memory lies in the host's; only its address distinguishes it from other tensors'.
"""

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only
from triton.runtime import interpreter

from octavo.engine.memory import cache_tensors
from tests.engine.execution.frozen import reads_values

POISON = 0xFF
"""Every byte of uninitialized memory: NaN, or -1."""
GPU = torch.device("cuda")
aten = torch.ops.aten


class HostWaitsError(AssertionError):
    """The host would synchronize with the GPU without an event."""


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, **_: bool) -> None:
        self.mark = _Mark(None)
        self.mark.done = True

    def record(self, stream: "Stream | None" = None) -> None:
        stream = stream or _gpu().current
        self.mark = _Mark(stream)
        stream.add(self.mark)

    def query(self) -> bool:
        _gpu().advance()
        return self.mark.done

    def synchronize(self) -> None:
        _gpu().run_to(self.mark)

    def elapsed_time(self, end: "Event") -> float:
        assert self.mark.done
        assert end.mark.done
        return 1.0


class _Mark:
    """A place in a stream's work."""

    def __init__(self, stream: "Stream | None") -> None:
        self.stream = stream
        self.done = False


class _Wait:
    def __init__(self, mark: _Mark) -> None:
        self.mark = mark


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, *_: Any) -> None:
        self._work: deque[_Mark | _Wait | Callable[[], object]] = deque()
        _gpu().streams.append(self)

    def add(self, work: "_Mark | _Wait | Callable[[], object]") -> None:
        self._work.append(work)

    def wait_event(self, event: Event) -> None:
        self.add(_Wait(event.mark))

    def step(self, *, forced: bool) -> bool:
        """Run the first queued item; return whether there was one that could run.

        Args:
            forced: Whether to run first what it waits for in another stream.
        """
        if not self._work:
            return False
        head = self._work[0]
        if isinstance(head, _Wait):
            if not head.mark.done:
                if not forced:
                    return False
                _gpu().run_to(head.mark)
            self._work.popleft()
            return True
        self._work.popleft()
        if isinstance(head, _Mark):
            head.done = True
        else:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
                head()
        return True


class Memory:
    """The memory of a tensor on the simulated GPU, or of a pinned tensor.

    Attributes:
        on_gpu: Whether it is GPU memory; else it is pinned.
        contents: The same bytes in another storage, so that queued items keep no tensor alive.
        pending: Number of queued copies.
        freed: Whether the tensor was freed.
    """

    def __init__(self, nbytes: int, *, on_gpu: bool, stream: Stream) -> None:
        size = max(16, -(-nbytes // 16) * 16)
        self._array = np.full(size, POISON, np.uint8)
        self.contents = torch.from_numpy(self._array)
        self.on_gpu, self.stream = on_gpu, stream
        self.pending, self.freed = 0, False

    def tensor(self, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over these bytes, in a new storage."""
        whole = torch.from_numpy(self._array).view(dtype)
        return whole.as_strided(tuple(shape), tuple(stride))

    def poison(self) -> None:
        """Overwrite the bytes."""
        self._array.fill(POISON)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view like a tensor's, which does not keep the tensor alive."""
        whole = self.contents.view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class LazyGpu:
    """The simulated GPU; a process uses at most one at a time.

    Attributes:
        may_wait: Whether copies may synchronize the host, as they may at startup.

    Args:
        seed: Seed of the random progress of streams.
        eagerness: Probability that an item runs whenever one is queued; 0: each runs as late as
            possible; 1: each runs at once.
    """

    def __init__(self, seed: int = 0, eagerness: float = 0.0) -> None:
        self.may_wait = True
        self.streams: list[Stream] = []
        self.default: Stream
        self.current: Stream
        self._memories: dict[int, Memory] = {}
        self._draw = random.Random(seed)
        self._eagerness = eagerness

    def advance(self) -> None:
        """Run some queued items, at random."""
        while self._draw.random() < self._eagerness:
            streams = list(self.streams)
            self._draw.shuffle(streams)
            if not any(stream.step(forced=False) for stream in streams):
                return

    def run_to(self, mark: _Mark) -> None:
        """Run all items before a mark."""
        while not mark.done:
            assert mark.stream is not None
            assert mark.stream.step(forced=True)

    def finish(self) -> None:
        """Run all queued items."""
        for stream in list(self.streams):
            while stream.step(forced=True):
                pass

    def launch(self, work: Callable[[], object]) -> None:
        """Queue a function, which uses aliases of tensors, in the current stream."""
        self.current.add(work)
        self.advance()

    def memory_of(self, tensor: object) -> Memory | None:
        """Return a tensor's memory; None if it is neither GPU memory nor pinned."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
            return None
        return self._memories.get(tensor.untyped_storage().data_ptr())

    def on_gpu(self, tensor: object) -> bool:
        """Return whether a tensor is in GPU memory."""
        memory = self.memory_of(tensor)
        return memory is not None and memory.on_gpu

    def allocate(self, like: torch.Tensor, *, on_gpu: bool = True) -> torch.Tensor:
        """Return a poisoned tensor with the shape, strides and dtype of another one."""
        last = sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
        nbytes = (1 + last if like.numel() else 0) * like.element_size()
        memory = Memory(nbytes, on_gpu=on_gpu, stream=self.current)
        tensor = memory.tensor(like.shape, like.stride(), like.dtype)
        address = tensor.untyped_storage().data_ptr()
        self._memories[address] = memory
        weakref.finalize(tensor.untyped_storage(), self._free, address).atexit = False
        return tensor

    def pin(self, tensor: torch.Tensor) -> None:
        """Register a host tensor as pinned memory that PyTorch does not know."""
        memory = Memory(0, on_gpu=False, stream=self.current)
        memory.contents = tensor.detach().view(-1).view(torch.uint8)
        memory.pending = 1  # never poisoned
        self._memories[tensor.untyped_storage().data_ptr()] = memory

    def _free(self, address: int) -> None:
        memory = self._memories.pop(address)
        memory.freed = True
        if memory.on_gpu:  # PyTorch gives it to others in the order of its own stream
            memory.stream.add(memory.poison)
        elif not memory.pending:
            memory.poison()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor for a queued item: an alias of GPU or pinned memory, else a copy."""
        memory = self.memory_of(tensor)
        return tensor.clone() if memory is None else memory.alias(tensor)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, wait: bool) -> None:
        """Queue a copy between host and GPU, as `Tensor.copy_`."""
        into, out_of = self.memory_of(target), self.memory_of(source)
        if wait or into is None or out_of is None:
            if not self.may_wait:
                raise HostWaitsError("a copy between host and GPU, or one of memory not pinned")
            self.finish()
        pinned = [each for each in (into, out_of) if each is not None and not each.on_gpu]
        aliases = self.alias(target), self.alias(source)
        for each in pinned:
            each.pending += 1

        def work() -> None:
            aliases[0].copy_(aliases[1])
            for each in pinned:
                each.pending -= 1
                if each.freed and not each.pending:
                    each.poison()

        self.launch(work)

    @contextmanager
    def in_use(self) -> Iterator["LazyGpu"]:
        """Let PyTorch and Triton use the simulated GPU in this context."""
        global _used  # noqa: PLW0603
        with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
            _used = self
            self.default = self.current = Stream()
            patch.setattr(torch.cuda, "Stream", Stream)
            patch.setattr(torch.cuda, "Event", Event)
            patch.setattr(torch.cuda, "stream", self._using)
            patch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
            patch.setattr(torch.cuda, "synchronize", lambda *_: self.finish())
            patch.setattr(torch.cuda, "get_device_properties", lambda _: PROPERTIES)
            patch.setattr(cache_tensors, "pin", lambda tensor, **_: self.pin(tensor))
            run = interpreter.InterpretedFunction.run

            def launch(kernel: Any, *given: Any, **named: Any) -> None:
                aliases = tree_map_only(torch.Tensor, self.alias, (given, named))
                self.launch(lambda: run(kernel, *aliases[0], **aliases[1]))

            patch.setattr(interpreter.InterpretedFunction, "run", launch)
            stack.enter_context(_Operators(self))
            stack.enter_context(_Functions(self))
            yield self
            self.finish()

    @contextmanager
    def _using(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


_used: LazyGpu | None = None
PROPERTIES = SimpleNamespace(
    name="lazy",
    major=8,
    minor=0,
    warp_size=32,
    shared_memory_per_block_optin=99 << 10,
    shared_memory_per_block=48 << 10,
    multi_processor_count=4,
)


def _gpu() -> LazyGpu:
    assert _used is not None
    return _used


class _Operators(TorchDispatchMode):
    """Queues operators on GPU tensors."""

    def __init__(self, gpu: LazyGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs, gpu = kwargs or {}, self._gpu
        tensors = [each for each in tree_flatten((args, kwargs))[0] if torch.is_tensor(each)]
        if not any(map(gpu.on_gpu, tensors)):
            return operator(*args, **kwargs)
        if operator.is_view:
            view = operator(*args, **kwargs)
            if all(map(gpu.on_gpu, tree_flatten(view)[0])):
                return view  # others copy here, such as `to` with another dtype
        if operator is aten.copy_.default:
            target, source = args[:2]
            if not gpu.on_gpu(target) or not gpu.on_gpu(source):
                gpu.copy(target, source, wait=not (len(args) > 2 and args[2]))
                return target
        if reads_values(operator, args):
            raise HostWaitsError(str(operator))
        for each in tensors:
            if each.dim() and not gpu.on_gpu(each):
                raise AssertionError(f"{operator}: tensors of the host and of the GPU")
        shapes = tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        made = operator(*shapes[0], **shapes[1])
        aliases = tree_map_only(torch.Tensor, gpu.alias, (args, kwargs))
        if operator._schema.is_mutable:
            gpu.launch(lambda: operator(*aliases[0], **aliases[1]))
            return kwargs.get("out", args[0])
        out = tree_map_only(torch.Tensor, gpu.allocate, made)
        into = tree_map_only(torch.Tensor, gpu.alias, out)

        def work() -> None:
            found = operator(*aliases[0], **aliases[1])
            for target, source in zip(tree_flatten(into)[0], tree_flatten(found)[0], strict=True):
                if source is not None:
                    target.copy_(source)

        if operator not in EMPTY:
            gpu.launch(work)
        return out


EMPTY = {aten.new_empty.default, aten.empty_like.default, aten.new_empty_strided.default}


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange}


class _Functions(TorchFunctionMode):
    """Allocates tensors in GPU memory, and reports their device as CUDA."""

    def __init__(self, gpu: LazyGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, gpu = dict(kwargs or {}), self._gpu
        if function == torch.Tensor.device.__get__:
            return GPU if gpu.on_gpu(args[0]) else function(*args)
        if function == torch.Tensor.is_cuda.__get__:
            return gpu.on_gpu(args[0])
        if function is torch.Tensor.pin_memory:
            pinned = gpu.allocate(args[0].contiguous(), on_gpu=False)
            return pinned.copy_(args[0])
        if function in FACTORIES:
            return self._make(function, args, kwargs)
        if function is torch.Tensor.to and "cuda" in {
            torch.device(each).type
            for each in (*args[1:], *kwargs.values())
            if isinstance(each, str | torch.device)
        }:
            return self._upload(args[0], *args[1:], **kwargs)
        if function in {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu} and gpu.on_gpu(
            args[0]
        ):
            raise HostWaitsError(function.__name__)
        return function(*args, **kwargs)

    def _make(self, function: Any, args: Any, kwargs: Any) -> torch.Tensor:
        gpu, pins = self._gpu, kwargs.pop("pin_memory", False)
        device = kwargs.pop("device", None)
        made = function(*args, **kwargs)
        if device is None or torch.device(device).type == "cpu":
            return gpu.allocate(made, on_gpu=False) if pins else made
        assert torch.device(device).type == "cuda"
        out = gpu.allocate(made)
        if function is not torch.empty:
            into = gpu.alias(out)
            gpu.launch(lambda: into.copy_(made))
        return out

    def _upload(
        self, tensor: torch.Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        assert not [each for each in args if isinstance(each, torch.dtype)]
        assert not kwargs.get("dtype")
        if self._gpu.on_gpu(tensor):
            return tensor.clone() if kwargs.get("copy") else tensor
        out = self._gpu.allocate(tensor.contiguous())
        self._gpu.copy(out, tensor, wait=not non_blocking)
        return out
