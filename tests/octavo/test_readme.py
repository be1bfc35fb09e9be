"""The programs and files in the documents work."""

import re
from dataclasses import fields
from pathlib import Path

import octavo as package
from octavo.router.tenants.tenant import hash_key, read_tenants
from tools import flag_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SECURITY = (ROOT / "docs/security.md").read_text()


def test_flags_are_the_settings():
    assert flag_table.TARGET.read_text() == flag_table.reference(), "run `make docs`"


def test_the_client_in_ten_lines_runs(service, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(program.strip().splitlines()) <= 10
    exec(program.replace("localhost:50051", service.address), {})
    assert capsys.readouterr().out.startswith("Why is the sky blue? \n")


def test_the_tenants_file_can_be_read(tmp_path):
    (table,) = re.findall(r"```toml\n(.*?)```", SECURITY, re.DOTALL)
    file = tmp_path / "tenants.toml"
    file.write_text(re.sub('sha256:[^"]*', hash_key("k"), table))
    (tenant,) = read_tenants(file)
    unset = [f.name for f in fields(tenant) if getattr(tenant, f.name) in (None, ())]
    assert not unset, "docs/security.md does not show them"


def test_all_is_what_there_is():
    assert all(hasattr(package, name) for name in package.__all__)
