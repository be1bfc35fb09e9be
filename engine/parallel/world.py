"""The process groups of an engine's ranks, and their messages.

They use torch.distributed: gloo between CPUs, NCCL between GPUs. Rank 0's messages use a separate
gloo group, as they are arrays in host memory.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from octavo.common.background import start_thread
from octavo.common.models.errors import first_line
from octavo.common.shutdown import exit_at_once
from octavo.engine.parallel.meeting import meet
from octavo.engine.parallel.messages import MessageRoom, join_broadcasts
from octavo.engine.parallel.one_shot import OneShotSums
from octavo.engine.parallel.place import RankLeftError, RankPlace
from octavo.engine.parallel.times import Times
from octavo.kernels.cpu.sums import DTYPES as SHARED_DTYPES
from octavo.kernels.cpu.sums import RankSums

FOREVER = timedelta(days=365)
"""Timeout of waiting for rank 0's next message: an idle rank 0 sends none."""
POLLED_SECONDS = 0.002
"""Seconds that a rank polls for a collective's end before it sleeps: most sums end before a
sleeping core would wake up."""
SENT_AT_ONCE = 4
"""Messages to other stages, per stage, that a rank keeps before it waits for the first."""
GATHERED_BYTES = 1 << 20
"""Bytes of a tensor above which more than two ranks sum in a ring: it sends less data in more
rounds."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32)
"""Dtypes of tensors that ranks may share, by their number in a message."""

EXIT_CODE = 1
FAILURE = "octavo/failure"
"""Key of the first failure of a rank in the ranks' store."""
STORE_PATIENCE = timedelta(seconds=5)
"""Maximum time to wait for the store, which may have left with another rank."""

ANSWER_SECONDS = 1.0
"""Maximum seconds in which the store says why a rank has left."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class World:
    """This rank and the groups that it shares with the others.

    Attributes:
        place: The place of this rank.
        stages: Number of stages, each with some of the layers. The first ranks are the first stage.
        tensors: The group of this stage's ranks, which sum layers and gather logits.
        control: The group for messages from rank 0.
        watch: The group in which ranks check that the others are alive.
        store: The store through which they found each other.
        shared: Sums in memory that all ranks share; None if they share none.
        one_shot: Sums of small tensors in memory that all GPUs share; None if they share none.
        serving: Whether the engine serves: then a collective that fails ends it, since all later
            ones would fail too, and its requests are better computed by another engine.
    """

    place: RankPlace
    stages: int
    tensors: dist.ProcessGroup
    control: dist.ProcessGroup
    watch: dist.ProcessGroup
    store: Any
    shared: RankSums | None = None
    one_shot: OneShotSums | None = None
    _times: Times = field(default_factory=Times)
    _sent: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    _room: MessageRoom = field(default_factory=MessageRoom)
    _exchanged: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    serving: bool = False

    @property
    def size(self) -> int:
        """Number of ranks of a stage, which share its layers."""
        return self.place.size // self.stages

    @property
    def rank(self) -> int:
        """The number of this rank in its stage."""
        return self.place.rank % self.size

    @property
    def stage(self) -> int:
        """The number of this rank's stage."""
        return self.place.rank // self.size

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's stage computes the logits."""
        return self.stage == self.stages - 1

    @property
    def times(self) -> Times:
        """The times measured so far."""
        shared = 0.0 if self.shared is None else self.shared.seconds
        return replace(self._times, reduce=self._times.reduce + shared)

    def send(self, message: np.ndarray) -> None:
        """Send bytes, `[n]` uint8, from rank 0 to all others."""
        with self._timed("broadcast"):
            for part in self._room.split(message):
                self._broadcast(torch.from_numpy(part))

    def receive(self) -> np.ndarray:
        """Wait for a message of rank 0, and return its bytes."""
        first = torch.empty(self._room.size, dtype=torch.uint8)
        with self._ending():
            self._broadcast(first)
            rest = torch.empty(self._room.rest_of(first.numpy()), dtype=torch.uint8)
            if len(rest):
                self._broadcast(rest)
        return join_broadcasts(first.numpy(), rest.numpy())

    def least(self, *numbers: int) -> list[int]:
        """Return the minimum over all ranks, for each argument."""
        minima = torch.tensor(numbers, dtype=torch.int64)
        with self._ending():
            dist.all_reduce(minima, dist.ReduceOp.MIN, group=self.control)
        least: list[int] = minima.tolist()
        return least

    def tell_all(self, *numbers: int) -> list[list[int]]:
        """Return the numbers of all ranks, in rank order."""
        own = torch.tensor(numbers, dtype=torch.int64)
        everyone = [torch.empty_like(own) for _ in range(self.place.size)]
        with self._ending():
            dist.all_gather(everyone, own, group=self.control)
        return [each.tolist() for each in everyone]

    def share(self, tensors: Sequence[Tensor] | None) -> list[Tensor]:
        """Broadcast rank 0's tensors to all ranks, on the CPU.

        Args:
            tensors: The tensors on rank 0; None on other ranks.
        """
        if tensors is not None:
            shapes = [(DTYPES.index(each.dtype), each.dim(), *each.shape) for each in tensors]
            numbers = np.array([number for shape in shapes for number in shape], np.int64)
            self.send(numbers.view(np.uint8))
            shared = [each.cpu().contiguous() for each in tensors]
        else:
            shared = list(_empty_tensors(self.receive().view(np.int64).tolist()))
        with self._ending():
            for each in shared:
                self._broadcast(each)
        return shared

    def sum(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the sum of a contiguous tensor over all ranks, the same on all.

        On CPUs each rank adds the parts in rank order, in float32 if there are more than two. On
        GPUs the host does not wait, and CUDA graphs can record the sum.

        Args:
            x: The tensor.
            out: Memory for the result of a sum by messages on CPUs.
        """
        if x.is_cuda:
            return self._sum_on_gpus(x)
        if self.shared is not None and x.is_cpu and x.dtype in SHARED_DTYPES:
            with self._ending():
                return self.shared.add(x)
        out = torch.empty_like(x) if out is None else out
        with self._timed("reduce"):
            if self.size > 2 and x.nbytes > GATHERED_BYTES:
                _finish(dist.all_reduce(out.copy_(x), group=self.tensors, async_op=True))
                return out
            copies, parts = self._exchange_buffers(x)
            # It takes half the time of an all-gather.
            _finish(
                dist.all_to_all_single(parts, copies.copy_(x), group=self.tensors, async_op=True)
            )
            if len(parts) == 2:
                return torch.add(*parts, out=out)
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            return out.copy_(total)

    def _exchange_buffers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return room for a copy of `x` to each rank and for one from each, `[size, *x.shape]`.

        All sums use the same room: small objects of the messages between memory of each left
        glibc's heap in pieces, and an engine grew by 100 MB with every few dozen requests.
        """
        needed = 2 * self.size * x.nbytes
        if len(self._exchanged) < needed:
            with torch.inference_mode(mode=False):  # in which later steps may not be
                self._exchanged = torch.empty(needed, dtype=torch.uint8)
        copies, parts = self._exchanged[:needed].view(x.dtype).view(2, self.size, *x.shape)
        return copies, parts

    def _sum_on_gpus(self, x: Tensor) -> Tensor:
        with self._timed("reduce"):
            if self.one_shot is not None and self.one_shot.takes(x):
                return self.one_shot.add(x)
            total = x.clone()
            dist.all_reduce(total, group=self.tensors)
            return total

    @property
    def unrecordable(self) -> str | None:
        """Why CUDA graphs cannot record this rank's communication; None if they can."""
        if self.stages > 1:
            return "stages send hidden states through the host"
        if self.shared is not None:
            return "ranks sum through shared memory, which runs on the host"
        group: Any = self.tensors  # the public function names the backends of all devices
        backend: str = group._get_backend(torch.device("cuda")).name()  # noqa: SLF001
        return None if backend == "nccl" else f"ranks sum through {backend}, which runs on the host"

    def broadcast(self, x: Tensor) -> None:
        """Replace a tensor of this stage's ranks by that of its first rank, in stream order."""
        with self._timed("broadcast"):
            first = self.stage * self.size
            if x.is_cuda:
                dist.broadcast(x, first, group=self.tensors)
            else:
                _finish(dist.broadcast(x, first, group=self.tensors, async_op=True))

    def receive_hidden(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the previous stage's hidden states, which are like `x`; in `out` if given."""
        hidden = torch.empty_like(x) if out is None else out
        with self._timed("receive"):
            dist.recv(hidden, self.place.rank - self.size)
        return hidden

    def send_hidden(self, x: Tensor, out: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Send hidden states to the next stage; return them."""
        with self._timed("send"):
            self._send(x.clone(), self.place.rank + self.size)
        return x

    def gather_columns(self, columns: Tensor, width: int) -> Tensor | None:
        """Join the columns of the last stage's ranks on rank 0.

        Args:
            columns: `[rows, n]`, this rank's columns; the last rank may have fewer than the others,
                and columns of other stages only have the right number and type of rows.
            width: The number of columns of all ranks.

        Returns:
            `[rows, width]` on rank 0; None on the others.
        """
        whole: Tensor | None = None
        columns = self._as_all_stages(columns)
        with self._timed("gather"):
            if self.is_last_stage:
                whole = self._join_columns(columns, width)
                if self.stages > 1 and whole is not None:
                    self._send(whole.contiguous(), 0)
            elif not self.place.rank:
                whole = columns.new_empty((len(columns), width))
                dist.recv(whole, self.place.size - self.size)
        return None if self.place.rank else whole

    def gather_columns_everywhere(self, columns: Tensor, width: int) -> Tensor:
        """Return the columns of the last stage's ranks, on all ranks; see `gather_columns`."""
        columns = self._as_all_stages(columns)
        whole = columns.new_empty((len(columns), width))
        with self._ending():
            if self.is_last_stage:
                padded = self._padded(columns, width)
                parts = [torch.empty_like(padded) for _ in range(self.size)]
                dist.all_gather(parts, padded, group=self.tensors)
                whole = torch.cat(parts, 1)[:, :width].contiguous()
            if self.stages > 1:
                dist.broadcast(whole, self.place.size - self.size)
        return whole

    def _as_all_stages(self, columns: Tensor) -> Tensor:
        """Return columns in a dtype that all stages have: only the last may have wide logits."""
        wide = torch.promote_types(columns.dtype, torch.float32)
        return columns.to(wide) if self.stages > 1 else columns

    def _join_columns(self, columns: Tensor, width: int) -> Tensor | None:
        """Join the columns of a stage's ranks on its first one."""
        padded = self._padded(columns, width)
        parts = [torch.empty_like(padded) for _ in range(self.size)] if not self.rank else None
        first = self.stage * self.size
        if padded.is_cuda:
            dist.gather(padded, parts, first, group=self.tensors)
        else:
            _finish(dist.gather(padded, parts, first, group=self.tensors, async_op=True))
        return None if parts is None else torch.cat(parts, 1)[:, :width]

    def _broadcast(self, x: Tensor) -> None:
        work = dist.broadcast(x, 0, group=self.control, async_op=True)
        if self.stages > 1 and not self.place.rank:
            self._keep(work, x)
        else:
            _finish(work)

    def _send(self, x: Tensor, rank: int) -> None:
        self._keep(dist.isend(x, rank), x)

    def _keep(self, work: dist.Work | None, x: Tensor) -> None:
        """Keep a tensor that is being sent; a stage that still computes takes it later."""
        assert work is not None
        self._sent.append((work, x))
        self.flush(SENT_AT_ONCE * self.stages)

    def flush(self, kept: int = 0) -> None:
        """Wait until at most some messages are still being sent."""
        while len(self._sent) > kept:
            self._sent.popleft()[0].wait()

    def _padded(self, columns: Tensor, width: int) -> Tensor:
        return torch.nn.functional.pad(
            columns, (0, self.part(width) - columns.shape[1])
        ).contiguous()

    def part(self, count: int) -> int:
        """Return a rank's share of `count`; the last rank's may be smaller."""
        return -(-count // self.size)

    def start_of(self, count: int) -> int:
        """Return the first index of this rank's share of `count`."""
        return self.part(count) * self.rank

    def end_engine(self, error: Exception) -> NoReturn:
        """End the process: another rank has left.

        Args:
            error: The error of the collective to which it did not come.
        """
        log.error(
            "another rank died, hangs or is cut off: the engine ends",
            rank=self.place.rank,
            error=self.failure() or str(error).splitlines()[0],
        )
        exit_at_once(EXIT_CODE)

    def tell_failure(self, error: Exception) -> None:
        """Write why this rank failed to the store, unless another rank failed first."""
        with suppress(RuntimeError):
            why = str(error) or type(error).__name__
            self.store.compare_set(FAILURE, "", f"rank {self.place.rank} failed: {why}")

    def failure(self) -> str | None:
        """Return why the first rank that failed has left; None if it did not say so.

        The store is cut off where rank 0 is: then its sockets would answer only after minutes.
        """
        answers: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):
                if self.store.check([FAILURE]):
                    answers.append(self.store.get(FAILURE).decode())

        start_thread(ask, "rank-failure").join(ANSWER_SECONDS)
        return answers[0] if answers else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Name the rank whose failure made a step fail, if one did.

        Raises:
            RankLeftError: One did, before the engine served.
        """
        try:
            yield
        except RuntimeError as error:
            if not self.serving and (why := self.failure()) is not None:
                raise RankLeftError(why) from error
            raise

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        with self._ending():
            yield
        spent = time.perf_counter() - began
        setattr(self._times, name, getattr(self._times, name) + spent)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End the engine if a collective fails while it serves.

        Raises:
            RankLeftError: It fails before that.
        """
        try:
            yield
        except RuntimeError as error:
            if self.serving:
                self.end_engine(error)
            why = self.failure() or f"another rank has left: {first_line(error)}"
            raise RankLeftError(why) from error


def _finish(work: dist.Work | None) -> None:
    """Wait until a collective of CPUs has ended."""
    assert work is not None
    end = time.perf_counter() + POLLED_SECONDS
    while not work.is_completed() and time.perf_counter() < end:
        _yield_core()
    work.wait()


def _empty_tensors(numbers: list[int]) -> Iterator[Tensor]:
    """Yield empty tensors from numbers: for each, dtype, number of dimensions, and sizes."""
    while numbers:
        kind, dims = numbers[0], numbers[1]
        yield torch.empty(numbers[2 : 2 + dims], dtype=DTYPES[kind])
        numbers = numbers[2 + dims :]


def join(
    place: RankPlace,
    device: torch.device,
    *,
    watch_seconds: float,
    stages: int = 1,
    facts: Mapping[str, str] | None = None,
) -> World:
    """Join the other ranks once; wait until all have joined.

    Args:
        place: The place of this rank.
        device: The model's device; a GPU becomes the current one of this thread.
        watch_seconds: Maximum seconds of a rank's silence.
        stages: Number of stages.
        facts: What all ranks must have alike, by name; see `meet`.

    Raises:
        RankError: Other ranks do not come, or run something else.
        RuntimeError: The other ranks cannot be reached.
    """
    if (world := current_world()) is not None:
        return world
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(place.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    store, rank, size = meet(place, facts or {})
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    size = place.size // stages
    groups = [
        dist.new_group(list(range(first, first + size))) for first in range(0, place.size, size)
    ]
    control = dist.new_group(backend="gloo", timeout=FOREVER)
    watch = dist.new_group(backend="gloo", timeout=timedelta(seconds=math.ceil(watch_seconds)))
    store.set_timeout(STORE_PATIENCE)
    world = World(place, stages, groups[place.rank // size], control, watch, store)
    _joined.append(world)
    return world


_yield_core: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))
"""Yield this core to another thread, such as the receiving one."""
_joined: list[World] = []


@contextmanager
def telling_failures() -> Iterator[None]:
    """Tell the other ranks about an error that ends this one while it starts."""
    try:
        yield
    except RankLeftError:
        raise
    except Exception as error:
        if (world := current_world()) is not None:
            world.tell_failure(error)
        raise


def current_world() -> World | None:
    """Return the ranks that this process computes with; None if it is alone."""
    return _joined[-1] if _joined else None
