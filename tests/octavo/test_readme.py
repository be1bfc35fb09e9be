"""What the README says is so."""

import re
from pathlib import Path

import octavo as package
from octavo.cli import flag_table

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_flags_are_the_settings():
    assert flag_table.insert(README) == README, "run `make readme`"


def test_the_client_in_ten_lines_runs(service, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(program.strip().splitlines()) <= 10
    exec(program.replace("localhost:50051", service.address), {})
    assert capsys.readouterr().out.startswith("Why is the sky blue? \n")


def test_all_is_what_there_is():
    assert all(hasattr(package, name) for name in package.__all__)
