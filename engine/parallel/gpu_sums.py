"""Finds out whether the GPUs of an engine's ranks can sum in memory that they share."""

from collections.abc import Callable

import structlog
import torch

from octavo.common.models.errors import first_line
from octavo.engine.parallel.one_shot import DTYPES, MOST_BYTES, OneShotSums
from octavo.engine.parallel.world import World

TRIED_NUMBERS = 4096

log = structlog.get_logger(__name__)


def share_gpus(world: World, device: torch.device) -> None:
    """Let ranks on the GPUs of one machine sum small tensors in one kernel, if all of them can.

    Args:
        world: The ranks; all of them call this.
        device: This rank's GPU.
    """
    if world.size == 1 or world.size > max(MOST_BYTES) or not _on_one_machine(world):
        return
    sums: OneShotSums | None = None

    def make() -> None:
        nonlocal sums
        own = torch.device(device.type, torch.cuda.current_device())
        sums = OneShotSums(world.tensors.group_name, world.size, own)

    def connect() -> None:
        assert sums is not None
        sums.connect()

    def compare() -> None:
        assert sums is not None
        _compare(world, sums, device)

    # A rank enters a step that needs the others only if the step before succeeded on all.
    for step in (make, connect, compare):
        if (why := _failure(step)) is not None:
            log.info("GPUs share no memory: small sums take longer", why=why)
        if not all(world.least(int(why is None))):
            return
    world.one_shot = sums


def _on_one_machine(world: World) -> bool:
    return world.place.local_size == world.place.size


def _failure(step: Callable[[], None]) -> str | None:
    """Run a step; return why it failed, or None."""
    try:
        step()
    except Exception as error:  # noqa: BLE001 - drivers and PyTorch raise many types
        return first_line(error)
    return None


def _compare(world: World, sums: OneShotSums, device: torch.device) -> None:
    """Sum some numbers.

    Raises:
        ValueError: A sum is wrong, or not the same on all ranks.
    """
    generator = torch.Generator().manual_seed(world.rank)
    for dtype in DTYPES:
        # Sums of small whole numbers are exact.
        own = torch.randint(-9, 10, (TRIED_NUMBERS,), generator=generator).to(device, dtype)
        expected = own.clone()
        torch.distributed.all_reduce(expected, group=world.tensors)
        exact, rounded = sums.add(own), sums.add(own / 7)
        marks = [_mark(exact), _mark(rounded)]
        if any(marks != others for others in world.tell_all(*marks)):
            raise ValueError(f"sums of {dtype} are not the same on all ranks")
        if not torch.equal(exact, expected):
            raise ValueError(f"sums of {dtype} are wrong")


def _mark(x: torch.Tensor) -> int:
    """Return a number that tells the bits of a tensor from others."""
    bits = x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32).long()
    return int((bits * torch.arange(1, len(bits) + 1, device=x.device)).sum())
