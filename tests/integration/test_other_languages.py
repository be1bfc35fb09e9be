"""The programs of clients/, built as in their READMEs: answers, cancellation and refusals."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import octavo
from benchmarks import fixture
from octavo.router.tenants.tenant import hash_key
from tests.conftest import Authority
from tests.integration.harness import Server, wait_until

CLIENTS = Path(__file__).parents[2] / "clients"
GO_SOURCES = Path("/usr/share/gocode/src/google.golang.org/grpc")
JARS = [
    Path("/usr/share/java", f"{name}.jar")
    for name in ("grpc-netty", "guava", "netty-transport", "perfmark-api", "protobuf")
]
KEY = "alice-key"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris.\n"
ENDLESS = ("--max-tokens", "1500", "Write a very long story about a lighthouse and its keeper.")


def has(*programs: str) -> bool:
    return all(map(shutil.which, programs))


@dataclass(frozen=True)
class Language:
    """A client: its commands to build and run in its directory, and a check of its tools."""

    name: str
    build: tuple[str, ...]
    command: tuple[str, ...]
    can_build: Callable[[], bool]
    has_tls: bool = True

    @property
    def directory(self) -> Path:
        return CLIENTS / self.name


LANGUAGES = (
    Language(
        "cpp",
        ("cmake -S . -B build", "cmake --build build --parallel"),
        ("build/octavo-chat",),
        lambda: (
            has("cmake", "c++", "protoc", "grpc_cpp_plugin", "pkg-config")
            and subprocess.run(["pkg-config", "--exists", "grpc++"], check=False).returncode == 0
        ),
    ),
    Language(
        "go",
        ("make debian",),
        ("build/octavo-chat",),
        lambda: (
            has("go", "make", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
            and GO_SOURCES.is_dir()
        ),
    ),
    Language(
        "java",
        ("make",),
        ("build/octavo-chat",),
        lambda: (
            has("java", "javac", "make", "protoc", "grpc_java_plugin")
            and all(jar.exists() for jar in JARS)
        ),
        has_tls=False,  # Debian's Netty lacks it
    ),
    Language(
        "node",
        ("npm run build",),
        ("node", "build/chat.js"),
        lambda: has("npm", "node") and (CLIENTS / "node/node_modules/.bin/tsc").exists(),
    ),
)


@dataclass(frozen=True)
class Program:
    """A built client; it uses one server by default."""

    language: Language
    address: str

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(
            [*self.language.command, *arguments],
            cwd=self.language.directory,
            env=os.environ | {"OCTAVO_ADDRESS": self.address} | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start it with its stdout as a pipe."""
        return subprocess.Popen(
            [*self.language.command, *arguments],
            cwd=self.language.directory,
            env=os.environ | {"OCTAVO_ADDRESS": self.address},
            stdout=subprocess.PIPE,
        )


FAST = {"node"}


@pytest.fixture(
    scope="module",
    params=[
        language if language.name in FAST else pytest.param(language, marks=pytest.mark.slow)
        for language in LANGUAGES
    ],
    ids=lambda language: language.name,
)
def language(request) -> Language:
    if not request.param.can_build():
        pytest.skip("its tools are not installed: tests/install_tools.sh --all does that")
    for command in request.param.build:
        built = subprocess.run(
            command,
            shell=True,
            cwd=request.param.directory,
            capture_output=True,
            text=True,
            check=False,
        )
        assert built.returncode == 0, f"{command}:\n{built.stdout}\n{built.stderr}"
    return request.param


@pytest.fixture
def program(language, served) -> Program:
    return Program(language, served.address)


@dataclass(frozen=True)
class Guarded:
    """Two routers with one tenant, whose key is KEY; one has TLS from the authority in `ca`."""

    plain: str
    tls: str
    ca: Path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Guarded]:
    """Routers with a tiny model of random weights."""
    directory = tmp_path_factory.mktemp("guarded")
    model = fixture.make_model(directory / "model")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "model/chat_template.jinja").write_text(template)
    tenants = directory / "tenants.toml"
    tenants.write_text(f'[alice]\nkeys = ["{hash_key(KEY)}"]\n')
    authority = Authority(directory / "authority")
    certificate, key = authority.issue("router", "ip:127.0.0.1")
    engine = fixture.engine(model)
    plain = fixture.router([engine.address], tenants=tenants)
    tls = fixture.router([engine.address], tenants=tenants, tls_cert=certificate, tls_key=key)
    nodes = (engine, plain, tls)
    try:
        for node in nodes:
            asyncio.run(node.start())
        for address, files in ((plain.address, None), (tls.address, octavo.Tls(authority.ca))):
            with octavo.Client(address, tls=files) as client:
                wait_until(client.is_serving, 60, "a router's connection to the engine")
        yield Guarded(plain.address, tls.address, authority.ca)
    finally:
        for node in reversed(nodes):
            asyncio.run(node.close())


def used_blocks(server: Server) -> float:
    return server.metric("octavo_engine_blocks", port=server.metrics_port + 1, state="used")


def cancelled(server: Server) -> float:
    return server.metric("octavo_router_requests_total", code="CANCELLED")


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.name)
def test_its_readme_says_how_it_is_built_and_run(language):
    readme = (language.directory / "README.md").read_text()
    for command in (*language.build, " ".join(language.command)):
        assert command in readme


def test_streams_an_answer_and_says_what_it_took(program):
    done = program(QUESTION)
    assert (done.returncode, done.stdout) == (0, ANSWER), done.stderr
    end = r"FINISH_REASON_EOS: \d\d prompt tokens \(\d+ cached\), 8 output tokens\n"
    assert re.fullmatch(end, done.stderr)


def test_text_comes_while_it_is_made_and_leaving_frees_the_blocks(program, served):
    process = program.start(*ENDLESS)
    try:
        assert process.stdout.read(1)
        assert process.poll() is None
        assert used_blocks(served) > 0
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    wait_until(lambda: used_blocks(served) == 0, what="no block in use")


def test_cancels_midway(program, served):
    before = cancelled(served)
    done = program("--cancel-after", "3", *ENDLESS)
    assert (done.returncode, done.stderr.strip()) == (0, "cancelled after 3 pieces")
    assert done.stdout.strip()
    wait_until(lambda: cancelled(served) == before + 1, what="a cancelled call")
    wait_until(lambda: used_blocks(served) == 0, what="no block in use")


def test_failures_are_told_apart(program, tmp_path):
    nowhere = tmp_path / "missing.pem"
    for code, what, *arguments in (
        (1, "missing.pem", "--ca", str(nowhere), QUESTION),
        (2, "usage: octavo-chat", "--nonsense", QUESTION),
        (2, "usage: octavo-chat", "--deadline", "0", QUESTION),
        (2, "MESSAGE is needed"),
        (64 + 3, "stop.max_tokens must be in [1, ", "--max-tokens", "100000", QUESTION),
        (64 + 14, "(?i)unavailable: ", "--address", "127.0.0.1:1", QUESTION),
    ):
        done = program(*arguments)
        assert done.returncode == code, (arguments, done.stderr)
        pattern = what if what.startswith("(?i)") else re.escape(what)
        assert re.search(pattern, done.stderr), (arguments, done.stderr)
        assert not done.stdout


def test_a_deadline_is_the_calls(program):
    done = program("--deadline", "0.3", *ENDLESS)
    refused = done.returncode == 64 + 8  # the server saw at once that time does not suffice
    assert refused or done.returncode == 64 + 4, done.stderr
    message = "(?i)resource_?exhausted: " if refused else "(?i)deadline_?exceeded: "
    assert re.search(message, done.stderr)


FEW = ("--max-tokens", "4", QUESTION)


def test_keys(language, guarded):
    program = Program(language, guarded.plain)
    for done in (program("--api-key", KEY, *FEW), program(*FEW, OCTAVO_API_KEY=KEY)):
        assert done.returncode == 0, done.stderr
        assert " 4 output tokens\n" in done.stderr
    assert program("--api-key", "another", *FEW).returncode == 64 + 16
    assert program(*FEW).returncode == 64 + 16


def test_tls(language, guarded):
    if not language.has_tls:
        pytest.skip("Debian's library has no TLS")
    program, ca = Program(language, guarded.tls), str(guarded.ca)
    for done in (
        program("--ca", ca, "--api-key", KEY, *FEW),
        program(*FEW, OCTAVO_CA=ca, OCTAVO_API_KEY=KEY),
    ):
        assert done.returncode == 0, done.stderr
        assert " 4 output tokens\n" in done.stderr
    assert program("--ca", ca, *FEW).returncode == 64 + 16
    assert program("--api-key", KEY, *FEW).returncode == 64 + 14  # no TLS
