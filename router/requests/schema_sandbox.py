"""Check JSON documents in a separate process: some schemas take forever, or all memory.

    python -m octavo.router.requests.schema_sandbox SECONDS

The process reads lines of JSON, `[schema, document]`, from standard input, and writes a line for
each to standard output: the document's errors, or the schema's. It ends when one check takes more
than SECONDS of CPU time.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from jsonschema_rs import FancyRegexOptions, ReferencingError, ValidationError, validator_for

from octavo.common.json_schema import Pointer
from octavo.router.requests.lenient_schema import ENCODINGS

MAX_ERRORS = 8
MAX_ERROR = 200
"""Maximum characters of an error."""
MEMORY_BYTES = 1 << 30
"""Maximum bytes of the process's address space."""
PATTERNS = FancyRegexOptions(backtrack_limit=100_000, size_limit=1 << 20)
_FORMATS = {
    name: lambda text, known=re.compile(pattern): known.search(text) is not None
    for name, pattern in ENCODINGS.items()
}


def main() -> None:
    """Serve until standard input ends."""
    seconds = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        outcome = _check(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(outcome), flush=True)


def _check(schema: str, document: str | None) -> dict[str, Any]:
    """Return `invalid`, the schema's error, or `errors`, the document's violations."""
    try:
        validator = _validator(schema)
    except (ReferencingError, ValidationError, ValueError) as error:
        message = error.message if isinstance(error, ValidationError) else str(error)
        place = error.instance_path if isinstance(error, ValidationError) else ()
        return {"invalid": _shown(place, message)}
    if document is None:
        return {"errors": []}
    try:
        value = json.loads(document)
    except (ValueError, RecursionError) as error:
        return {"errors": [_shown((), f"it is not JSON: {error}")]}
    return {"errors": list(islice(_errors(validator, value), MAX_ERRORS))}


@lru_cache(maxsize=8)
def _validator(schema: str) -> Any:  # noqa: ANN401 - one class for each draft
    """Return a schema's validator, which fetches no remote references."""
    return validator_for(
        json.loads(schema),
        formats=_FORMATS,
        validate_formats=True,
        retriever=_refuse,
        pattern_options=PATTERNS,
    )


def _refuse(uri: str) -> Any:  # noqa: ANN401 - it never returns
    raise ValueError(f"{uri}: a reference to another document is not followed")


def _errors(validator: Any, document: object) -> Iterator[str]:  # noqa: ANN401
    for error in validator.iter_errors(document):
        yield _shown(error.instance_path, error.message)


def _shown(place: Sequence[str | int], message: str) -> str:
    shown = f"{Pointer('#', *map(str, place))}: {message}"
    return shown if len(shown) <= MAX_ERROR else f"{shown[:MAX_ERROR]}..."


if __name__ == "__main__":
    main()
