"""Memory in which the ranks of one machine sum; it has no name, so nothing is left of it."""

import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path

import structlog

from octavo.engine.parallel.world import World
from octavo.kernels import cpu

PATIENCE_SECONDS = 1800.0
"""Maximum seconds to wait for another rank, as in torch.distributed: while an engine serves, the
watch ends it sooner."""
TOKEN_BYTES = 32

log = structlog.get_logger(__name__)


def share_memory(world: World) -> None:
    """Let ranks on one CPU machine sum in shared memory, if all of them can.

    A stage's first rank makes its memory, and the others open it through /proc: a token shows that
    it is the same, as in containers of their own a process of another number may have it.

    Args:
        world: The ranks; all of them call this.
    """
    sums = cpu.sums
    if world.size == 1 or world.place.local_size != world.place.size:
        return
    memory: mmap.mmap | None = None
    size = 0 if sums is None else sums.bytes(world.size) + TOKEN_BYTES
    descriptor, token = -1, secrets.token_bytes(TOKEN_BYTES)
    if not world.rank:
        with suppress(OSError, AttributeError):  # not on Linux
            descriptor = os.memfd_create("octavo-sums")
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
            memory[-TOKEN_BYTES:] = token
    pid, number, *shared = world.tell_all(os.getpid(), descriptor, *token)[world.stage * world.size]
    if world.rank:
        token = bytes(shared)
        with suppress(OSError, ValueError), Path(f"/proc/{pid}/fd/{number}").open("r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
    can = sums is not None and memory is not None and memory[-TOKEN_BYTES:] == token
    everyone = bool(*world.least(int(can)))
    if descriptor >= 0:
        os.close(descriptor)
    if everyone:
        assert sums is not None
        assert memory is not None
        sums.share(memory, world.rank, world.size, PATIENCE_SECONDS)
        world.shared = sums
    else:
        log.warning("ranks share no memory: they sum through sockets, which is slower")
