"""The time of a process, by thread and by function."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def thread_times(process: int) -> dict[int, tuple[float, float]]:
    """Return the seconds that each thread ran and waited for a core, as Linux counts them.

    Args:
        process: Its id.
    """
    times = {}
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            ran, waited, _ = map(int, (thread / "schedstat").read_text().split())
            times[int(thread.name)] = ran / 1e9, waited / 1e9
    return times


def timed(
    function: Callable[..., Any], add: Callable[[str, float], None], part: str
) -> Callable[..., Any]:
    """Wrap a function to add the seconds of each call to a part.

    Args:
        function: The function.
        add: Called with the part and the seconds.
        part: The part that the function belongs to.
    """

    def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        began = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            add(part, time.perf_counter() - began)

    return call
