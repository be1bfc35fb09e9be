"""Links in the documents resolve, and their claims about the sources hold."""

import ast
import graphlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from octavo.v1 import engine_pb2

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "examples/README.md", "protos/README.md")),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "clients").glob("README.md"),
        *(ROOT / "clients").glob("*/README.md"),
    ]
)
MADE = {"node_modules", "build", "dist", "venv"}
FOLDERS = ("engine", "kernels", "octavo", "router")
"""Source folders; the first, second and fourth are imported as `octavo.engine` and so on."""
CODE = re.compile(r"```.*?```", re.DOTALL)


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


def anchors(text: str) -> set[str]:
    """Return the link fragments of a document's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@named(DOCUMENTS)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)]+)\)", CODE.sub("", path.read_text())):
        target, _, fragment = link.partition("#")
        if "://" in target:
            continue
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), f"{link} is not there"
        if fragment:
            assert fragment in anchors(there.read_text()), f"{link}: no such heading"


@cache
def everything() -> frozenset[str]:
    """Return all files, and all folders with a trailing slash, relative to the root."""
    found = set()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in MADE]
        here = f"/{Path(folder).relative_to(ROOT)}/".replace("/./", "/")
        found |= {f"{here}{name}" for name in files} | {f"{here}{name}/" for name in folders}
    return frozenset(found)


@named(DOCUMENTS)
def test_files_that_are_named_are_there(path):
    """Paths in backticks may be just the end of a path."""
    text = CODE.sub("", path.read_text())
    for name in re.findall(r"`([\w./-]+/|[\w./-]+\.(?:py|md|proto|cpp|h|cc|sh|toml|ts))`", text):
        there = any(path.endswith(f"/{name}") for path in everything())
        assert there or name in SHOWN_NOT_THERE, f"`{name}` is not there"


SHOWN_NOT_THERE = {"router/balancing/two_choices.py"}
"""Names that an example would add."""


# docs/architecture.md


def imports(path: Path) -> Iterator[str]:
    """Return the dotted names that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, packages) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def linked(path: Path) -> bool:
    """Return whether a path goes through a link such as `octavo/engine`."""
    return path.resolve() != path


def dotted(path: Path) -> str:
    """Return the module name of a file."""
    parts = path.with_suffix("").parts
    name = ".".join(parts if parts[0] == "octavo" else ("octavo", *parts))
    return name.removesuffix(".__init__")


@cache
def sources() -> dict[str, Path]:
    """Return all of Octavo's modules by dotted name, except stubs."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    names = {dotted(path.relative_to(ROOT)): path for path in files if not linked(path)}
    return {name: path for name, path in names.items() if not within(name, ["octavo.v1"])}


def table() -> dict[str, list[str]]:
    """Return the packages of docs/architecture.md and their allowed imports."""
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `(octavo\.[\w.]+)` \|(.*)\|$", text, re.MULTILINE)
    return {package: re.findall(r"`([\w.]+)`", names) for package, names in rows}


def home(module: str, packages) -> str | None:
    """Return the innermost package of a module."""
    return max((p for p in packages if within(module, [p])), key=len, default=None)


def test_layers_are_those_of_the_table():
    allowed = table()
    assert {"octavo.engine", "octavo.kernels", "octavo.router", "octavo.cli"} <= set(allowed)
    judged = set()
    for module, path in sources().items():
        if (package := home(module, allowed)) is None:
            continue  # octavo/__init__.py and the like
        judged.add(package)
        for name in imports(path):
            if within(name, ["octavo"]) and name != "octavo":
                may = [package, *allowed[package]]
                assert within(name, may), f"{module} imports {name}"
    assert judged == set(allowed)


def test_no_two_packages_import_each_other():
    rooms = set(table())
    folders = {
        f"{root}.{name}"
        for root in ("octavo.engine", "octavo.router")
        for name in (
            p.name for p in (ROOT / root.split(".")[1]).iterdir() if (p / "__init__.py").exists()
        )
    }
    assert folders <= rooms, "every folder of engine and router has a row"
    needs = {}
    for module, path in sources().items():
        needs[module] = {name for name in map(longest_module, imports(path)) if name}
    for graph in (needs, by_package(needs, rooms)):
        tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def longest_module(name: str) -> str | None:
    """Return the module of a dotted name, if it is Octavo's."""
    known = sources()
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name if name not in {"", "octavo"} else None


def by_package(needs, rooms):
    """Return each package's imports; modules outside folders count as packages."""
    whole = rooms - {"octavo.engine", "octavo.router"}
    graph = {}
    for module, names in needs.items():
        here = home(module, whole) or module
        graph.setdefault(here, set()).update({home(name, whole) or name for name in names} - {here})
    return graph


def test_pytorch_stays_where_it_is_said_to():
    text = (ROOT / "docs/architecture.md").read_text()
    (said,) = re.findall(
        r"^PyTorch is imported only in ([^.]*(?:\.\w[^.]*)*)\.$", text, re.MULTILINE
    )
    homes = re.findall(r"`([\w.]+)`", said)
    for module, path in sources().items():
        if any(within(name, ["torch"]) for name in imports(path)):
            assert within(module, homes), module


def test_nobody_imports_by_the_bare_names():
    """`import kernels` would import Hugging Face's package, or this folder by accident."""
    folders = ("octavo", "engine", "router", "kernels", "tests", "benchmarks", "tools", "examples")
    for path in (p for folder in folders for p in (ROOT / folder).rglob("*.py")):
        for name in imports(path):
            assert not within(name, ["engine", "router", "kernels"]), f"{path} imports {name}"


# docs/extending.md


@dataclass(eq=False)
class Replica:
    """An engine as balancing policies see it."""

    sequences: int = 0
    max_num_seqs: int = 8
    load: engine_pb2.Load = field(default_factory=engine_pb2.Load)


@dataclass(frozen=True)
class Needs:
    sequences: int = 1
    model: str = "m"
    prompt: None = None


def test_the_policy_chooses():
    (program,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL
    )
    names = {}
    exec(program, names)
    choose = names["two_choices"]
    idle, calm, busy, full = map(Replica, (1, 2, 4, 9))
    assert choose([busy, idle], Needs()) is idle
    assert choose([full, busy], Needs()) is busy
    assert choose([full], Needs()) is None
    assert choose([], Needs()) is None
    drawn = {choose([idle, calm, busy], Needs()) for _ in range(200)}
    assert drawn == {idle, calm}, "two of three are drawn, and the less occupied is chosen"
