"""Fixtures of all tests."""

import gc
import ipaddress
import os
import re
import signal
import ssl
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from octavo.common.models.resolve import DEMO

LONG = {"test_traced_forward.py", "test_triton_compiled.py", "test_triton_interpreted.py"}
"""The slowest files besides the integration tests."""

KEPT = {"OCTAVO_CACHE_DIR"}

# With a test process on each core, more threads would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each of the many processes that tests start would compile the sources, for a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell's background job ignores interrupts, and so would programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Otherwise structlog lets rich render an exception's locals, which takes up to seconds.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)

# The speed of drawing examples shows the machine's load, not a fault.
settings.register_profile("octavo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("octavo")


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """Run three tests on two cores: they wait for timeouts and servers a quarter of the time."""
    return (yield) * 3 // 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Give all files that use the server `served` to one process, which starts it once."""
    if config.getvalue("dist") != "loadfile":
        return None
    folder = Path(__file__).parent / "integration"
    uses = re.compile(r"def \w+\([^)]*\bserved\b")
    served = {path.name for path in folder.glob("test_*.py") if uses.search(path.read_text())}

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return "served" if Path(path).name in served else path

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Spare the garbage collector all modules and tests, which stay."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases beyond `few` slow; run the slowest files first: short ones balance the end."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            functions.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cases in functions.values():
        (count,) = next(cases[0].iter_markers("few")).args
        kept = {round(i * len(cases) / count) for i in range(count)}
        for i, case in enumerate(cases):
            if i not in kept:
                case.add_marker("slow")

    def rank(item: pytest.Item) -> int:
        if "integration" in item.path.parts:
            return 0
        return 1 if item.path.name in LONG else 2

    items.sort(key=rank)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the demo model's directory; the first run on a machine fetches and converts it."""
    # Imported here, because the process that distributes the tests needs no PyTorch.
    from octavo.engine.models.resolve_or_convert import resolve

    return Path(resolve(DEMO))


class Authority:
    """Issues certificates as PEM files in a directory; its own certificate is `ca`."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
        certificate = self._sign(self._name, self._key, x509.BasicConstraints(True, None))
        self.ca = self._write("ca.pem", certificate.public_bytes(serialization.Encoding.PEM))

    def client_context(self) -> ssl.SSLContext:
        """Return a context that trusts it, though it has not all that Python 3.13 asks for."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca)
        return context

    def issue(self, file: str, *identities: str, cn: str = "somebody") -> tuple[Path, Path]:
        """Write FILE.pem and FILE.key for "dns:", "ip:" and "uri:" names; return both."""
        key = ec.generate_private_key(ec.SECP256R1())
        kinds = {
            "dns": x509.DNSName,
            "uri": x509.UniformResourceIdentifier,
            "ip": lambda text: x509.IPAddress(ipaddress.ip_address(text)),
        }
        pairs = (identity.split(":", 1) for identity in identities)
        names = x509.SubjectAlternativeName([kinds[kind](text) for kind, text in pairs])
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, cn)])
        certificate = self._sign(subject, key, *([names] if identities else []))
        pem = serialization.Encoding.PEM
        secret = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return (
            self._write(f"{file}.pem", certificate.public_bytes(pem)),
            self._write(f"{file}.key", secret),
        )

    def _sign(self, subject, key, *extensions) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, pem: bytes) -> Path:
        self._directory.mkdir(exist_ok=True)
        fresh = self._directory / f".{name}"  # readers never see half a file
        fresh.write_bytes(pem)
        return fresh.replace(self._directory / name)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def impostor(tmp_path: Path) -> Authority:
    """Return an authority that no server trusts."""
    return Authority(tmp_path / "impostor")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a developer's OCTAVO_... variables out of the tests."""
    for name in os.environ:
        if name.startswith("OCTAVO_") and name not in KEPT:
            monkeypatch.delenv(name)
