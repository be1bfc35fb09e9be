"""The contracts: buf's checks, and the generated reference."""

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"
BUF = ROOT / "clients/node/node_modules/.bin/buf"


@pytest.fixture
def buf():
    """Run buf at the root."""
    if not (BUF.exists() and shutil.which("node")):
        pytest.skip("buf is not installed: tests/install_tools.sh does that")

    def run(*arguments):
        command = [BUF, *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def changed(tmp_path):
    """Copy the contracts with one text in one file replaced."""

    def change(file, old, new):
        copy = shutil.copytree(PROTOS, tmp_path / "protos")
        contract = copy / "octavo/v1" / file
        assert contract.read_text().count(old) == 1
        contract.write_text(contract.read_text().replace(old, new))
        return str(copy)

    return change


def breaking(buf, protos="protos"):
    return buf("breaking", protos, "--against", "protos/released.binpb")


def test_style(buf):
    done = buf("lint", "protos")
    assert done.returncode == 0, done.stdout


def test_nothing_released_is_broken(buf):
    done = breaking(buf)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("generation.proto", "uint32 output_tokens = 3;", "uint32 output_tokens = 9;", '"3"'),
        ("generation.proto", "uint32 output_tokens = 3;", "uint64 output_tokens = 3;", "uint64"),
        ("sampling.proto", "  FINISH_REASON_STOP_TOKEN = 4;\n", "", '"4"'),
        ("engine.proto", "(stream SessionRequest)", "(SessionRequest)", "streaming"),
    ],
    ids=["renumbered", "retyped", "removed", "unary"],
)
def test_a_broken_contract_is_told(buf, changed, file, old, new, complaint):
    done = breaking(buf, changed(file, old, new))
    assert done.returncode != 0
    assert f"{file}:" in done.stdout
    assert complaint in done.stdout


def test_additions_are_allowed(buf, changed):
    more = "uint32 output_tokens = 3;\n  // Something new.\n  uint32 new_tokens = 9;"
    done = breaking(buf, changed("generation.proto", "uint32 output_tokens = 3;", more))
    assert done.returncode == 0, done.stdout


def test_bad_style_is_told(buf, changed):
    done = buf("lint", changed("generation.proto", "uint32 output_tokens = 3;", "uint32 Out = 3;"))
    assert done.returncode != 0
    assert "Out" in done.stdout


def test_the_reference_is_up_to_date():
    made = runpy.run_path(str(ROOT / "tools" / "api_reference.py"))["reference"]()
    assert (ROOT / "docs/api.md").read_text() == made, "run `make docs`"
    anchors = {heading.lower() for heading in re.findall(r"^###? (\w+)$", made, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(\w+)\)", made)) <= anchors
