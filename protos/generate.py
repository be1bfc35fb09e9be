"""Generate typed Python stubs from the contracts in protos/."""

import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

PROTOS = Path(__file__).parent
PACKAGE = "octavo/v1"


def generate(root: Path) -> None:
    """Writes stubs for protos/octavo/v1/*.proto to `root`/octavo/v1/.

    Raises:
        subprocess.CalledProcessError: a contract does not compile; protoc has
            printed where.
    """
    target = root / PACKAGE
    target.mkdir(parents=True, exist_ok=True)
    for stale in target.glob("*_pb2*"):
        stale.unlink()
    (target / "__init__.py").write_text('"""Stubs of the contracts in protos/octavo/v1."""\n')
    contracts = sorted(str(path) for path in (PROTOS / PACKAGE).glob("*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    scripts = Path(sys.executable).parent
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={PROTOS}",
            f"--proto_path={well_known}",
            f"--plugin=protoc-gen-mypy={_plugin('protoc-gen-mypy', scripts)}",
            f"--plugin=protoc-gen-mypy_grpc={_plugin('protoc-gen-mypy_grpc', scripts)}",
            f"--python_out={root}",
            f"--grpc_python_out={root}",
            f"--mypy_out=quiet:{root}",
            f"--mypy_grpc_out=quiet:{root}",
            *contracts,
        ],
        check=True,
    )


def _plugin(name: str, scripts: Path) -> str:
    """Finds a protoc plugin, in an isolated build environment too."""
    return shutil.which(name) or str(scripts / name)


if __name__ == "__main__":
    generate(PROTOS.parent)
