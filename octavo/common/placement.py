"""Placement: the cores and memory for one of several engines on a machine."""

import ctypes
import errno
import os
import platform
from dataclasses import dataclass

import structlog

from octavo.common.topology import format_list

log = structlog.get_logger(__name__)

SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Linux's number of the set_mempolicy system call, by machine; libc has no function for it."""
MPOL_BIND = 2
CAPABILITY_HINT = "in a container, add the capability SYS_NICE"


@dataclass(frozen=True, slots=True)
class Placement:
    """The part of a machine that one of several engines uses.

    Attributes:
        cpus: Hardware threads to run on.
        node: Their NUMA node.
        binds_memory: Whether memory is bound to the node, if there are several.
        engines: Number of engines that share this process's limits.
        engines_on_node: Number of engines on the same node.
    """

    cpus: tuple[int, ...]
    node: int
    binds_memory: bool = False
    engines: int = 1
    engines_on_node: int = 1

    def __str__(self) -> str:
        return f"node {self.node}, CPUs {format_list(self.cpus)}"


_current: Placement | None = None


def current() -> Placement | None:
    """Return this process's placement; None if it may use everything available."""
    return _current


def bind(placement: Placement) -> None:
    """Bind this process to a placement: the calling thread, and threads that it starts later.

    If memory cannot be bound, Linux still allocates it on the node that writes to it first, unless
    that node is full.
    """
    global _current  # noqa: PLW0603 - process-wide, like the affinity
    _current = placement
    os.sched_setaffinity(0, placement.cpus)
    if placement.binds_memory:
        _bind_memory(placement.node)


def _bind_memory(node: int) -> None:
    """Allocate this thread's memory on a node only; if Linux refuses, log a warning."""
    number = SET_MEMPOLICY.get(platform.machine())
    try:
        if number is None:
            raise OSError(f"its number is unknown on {platform.machine()}")  # noqa: TRY301
        _set_mempolicy(number, node)
    except OSError as error:
        log.warning(
            "the engine's memory is not bound to its NUMA node: it may be allocated on another"
            " node when this one is full, which is slower",
            node=node,
            error=f"set_mempolicy: {error.strerror or error}",
            **({"hint": CAPABILITY_HINT} if error.errno == errno.EPERM else {}),
        )


def _set_mempolicy(number: int, node: int) -> None:
    """Call set_mempolicy(2).

    Raises:
        OSError: Linux refuses; Docker's default seccomp profile makes that EPERM.
    """
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = node // bits + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    # Linux ignores the last bit of the given number.
    size = ctypes.c_ulong(words * bits + 1)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(MPOL_BIND), mask, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
