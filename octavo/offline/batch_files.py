"""The files of a batch: requests, results and errors, each with one JSON object per line.

The format is that of OpenAI's batches: https://platform.openai.com/docs/guides/batch. Results are
written in the order of the requests, so the number of lines says where a batch goes on that was
killed, whatever its size.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Self


class BatchFileError(Exception):
    """The files cannot be used; the message says why."""


class BatchFiles:
    """Open the files of a batch; what they hold of an earlier run is kept.

    Args:
        requests: The requests.
        results: The answers, whose status is 200.
        errors: Everything else.

    Attributes:
        completed: Number of requests that were answered before.
        failed: Number of requests that had an error before.

    Raises:
        BatchFileError: The results are of other requests.
        OSError: A file cannot be read or written.
    """

    def __init__(self, requests: Path, results: Path, errors: Path) -> None:
        with ExitStack() as stack:
            self._requests = stack.enter_context(requests.open("rb"))
            self._results = stack.enter_context(results.open("ab+"))
            self._errors = stack.enter_context(errors.open("ab+"))
            self._lines = (line for line in self._requests if line.strip())
            written = [_read_written(file) for file in (self._results, self._errors)]
            (self.completed, _), (self.failed, _) = written
            self._skip([last for _, last in written])
            self._stack = stack.pop_all()

    @property
    def done(self) -> int:
        """Number of requests that had a result or an error before."""
        return self.completed + self.failed

    def _skip(self, last_ids: list[Any]) -> None:
        """Skip the requests that are done; the last one is the last of a file.

        Raises:
            BatchFileError: It is not.
        """
        last = b"{}"
        for number in range(self.done):
            if (last := next(self._lines, b"")) == b"":
                raise BatchFileError(
                    f"{self._results.name} and {self._errors.name} have {self.done} results,"
                    f" {self._requests.name} has {number} requests: give another output"
                )
        if self.done and custom_id(last) not in last_ids:
            raise BatchFileError(
                f"{self._results.name} has the results of other requests than"
                f" {self._requests.name}: give another output"
            )

    def requests(self) -> Iterator[bytes]:
        """Yield the requests that are not done."""
        yield from self._lines

    def write(self, result: dict[str, Any]) -> None:
        """Write the next request's result, with status 200, or its error."""
        file = self._results if is_answer(result) else self._errors
        file.write(json.dumps(result, ensure_ascii=False).encode() + b"\n")
        file.flush()

    def close(self) -> None:
        """Write everything to the disk, and close the files."""
        for file in (self._results, self._errors):
            os.fsync(file.fileno())
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_answer(result: dict[str, Any]) -> bool:
    """Return whether a request was answered with status 200."""
    response = result["response"]
    return response is not None and response["status_code"] == 200


def custom_id(line: bytes) -> Any:  # noqa: ANN401 - JSON
    """Return the `custom_id` of a line; None if it has none."""
    try:
        request = json.loads(line)
    except ValueError:
        return None
    return request.get("custom_id") if isinstance(request, dict) else None


def _read_written(file: BinaryIO) -> tuple[int, Any]:
    """Return the number of whole lines and the last one's id; cut off a line that is not whole."""
    file.seek(0)
    count, last, end = 0, b"", 0
    for line in file:
        if not line.endswith(b"\n"):
            file.truncate(end)
            break
        count, last, end = count + 1, line, end + len(line)
    return count, custom_id(last)
