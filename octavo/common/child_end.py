"""Describes why a child process ended: exit code or signal, and whether memory ran out."""

import signal

from octavo.common import resources
from octavo.common.resources import OomKills


def why_it_ended(code: int, before: OomKills, remedy: str) -> str:
    """Return why a child process ended, as text.

    Args:
        code: Exit code; negative for a signal, as in subprocess.
        before: The kernel's counters before the child started.
        remedy: Advice if memory ran out.
    """
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    if -code != signal.SIGKILL:
        return f"killed by {name}"
    by_kernel = resources.oom_kills().rose_since(before)
    if by_kernel is False:
        return f"killed by {name}, but not by the kernel for lack of memory"
    probably = "" if by_kernel else "probably "
    return f"killed by {name}: the kernel {probably}ended it for lack of memory; {remedy}"
