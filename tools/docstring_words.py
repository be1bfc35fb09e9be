"""Refuse words in docstrings that a newcomer has to read twice.

    python -m tools.docstring_words [PATH ...]

Without paths it checks `CLEAN`, the folders and files that have none of them. Refused are:

- the text of an attribute, an argument, a return value or an error that begins with "Of", "As" or
  "Whose", and so lacks its noun; likewise the text below a constant or a field;
- a lower-case letter at the beginning of an attribute's, argument's or returned value's text;
- "Return what ...", which does not name the thing;
- "Likewise" as the whole text.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

CLEAN = (
    "benchmarks",
    "engine",
    "examples",
    "kernels",
    "octavo",
    "router",
    "tests",
    "tools",
)
"""Folders and files without these words; add to them, so that none come back."""

UNNAMED = {"Returns:", "Yields:"}
SECTIONS = {"Args:", "Attributes:", "Raises:", *UNNAMED}
ENTRY = re.compile(r" {4}(?:\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*(?: \([^)]*\))?: )?(?P<text>\S.*)")
NO_NOUN = re.compile(r"(of|as|whose)\b", re.IGNORECASE)
RETURN_WHAT = re.compile(r"Returns? what\b")
LIKEWISE = re.compile(r"Likewise\W*")


def complaints(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the fault of each refused text in the docstrings of Python code."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text)) as docstring):
                for offset, fault in _faults(text):
                    yield docstring.lineno + offset, fault


def _faults(docstring: str) -> Iterator[tuple[int, str]]:
    """Yield the line, counted from the docstring's first, and the fault of each refused text."""
    first, *rest = docstring.splitlines() or [""]
    if NO_NOUN.match(first):
        yield 0, f"begin with a noun: {first!r}"
    if RETURN_WHAT.match(first):
        yield 0, f"name what is returned: {first!r}"
    if LIKEWISE.fullmatch(docstring.strip()):
        yield 0, "describe this one too, instead of 'Likewise'"
    for offset, text in _entries(rest):
        if NO_NOUN.match(text):
            yield offset, f"begin with a noun: {text!r}"
        elif text[0].islower():
            yield offset, f"begin with a capital letter: {text!r}"
        if LIKEWISE.fullmatch(text):
            yield offset, "describe this one too, instead of 'Likewise'"


def _entries(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each entry in a docstring's sections, without its name."""
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    section = ""
    for offset, line in enumerate((line[margin:] for line in lines), start=1):
        if line and not line.startswith(" "):
            section = line
        elif section in SECTIONS and (entry := ENTRY.fullmatch(line)):
            yield offset, entry["text"]
            if section in UNNAMED:
                section = ""  # what follows continues the only entry


def python_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the Python files that are named, and those in the named folders."""
    for path in paths:
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def check(paths: Iterable[Path]) -> list[str]:
    """Return a line for each refused text in the files: its place and the fault."""
    return [
        f"{path}:{line}: {fault}"
        for path in python_files(paths)
        for line, fault in complaints(path.read_text())
    ]


if __name__ == "__main__":
    found = check([Path(name) for name in sys.argv[1:]] or [ROOT / name for name in CLEAN])
    print(*found, sep="\n", end="\n" * bool(found))
    sys.exit(bool(found))
