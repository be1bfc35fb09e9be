from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from octavo.cli.options import load, settings_options
from octavo.common.settings import Settings, SettingsError


class Example(Settings):
    table: ClassVar[str] = "router"
    former_names: ClassVar[dict[str, str]] = {"docking": "port"}

    model: str = Field(description="The model.")
    port: int = Field(50051, ge=0, le=65535, description="The port.")
    peers: list[str] = Field(default_factory=list, description="Others.")
    mode: Literal["a", "b"] = Field("a", description="The mode.")
    fast: bool = Field(True, description="Whether to hurry.")
    share: float | None = Field(None, description="The share [0, 1].")
    notes: dict[str, Any] = Field({}, description="Some notes.")


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "octavo.toml"
        path.write_text(text)
        return path

    return write


def test_flag_over_variable_over_file_over_default(toml, monkeypatch):
    path = toml('model = "file"\nport = 1\nmode = "b"\n')
    monkeypatch.setenv("OCTAVO_MODEL", "variable")
    monkeypatch.setenv("OCTAVO_PORT", "2")
    settings = Example.load(config=path, port="3")
    assert (settings.port, settings.model, settings.mode) == (3, "variable", "b")
    assert settings.fast is True


def test_own_table_wins_and_others_are_passed_over(toml):
    path = toml(
        'model = "flat"\nnum-blocks = 9\n[router]\nmodel = "own"\nlog-level = "debug"\n'
        '[engine]\nmodel = "other"\nnothing = 1\n'
    )
    settings = Example.load(config=path)
    assert (settings.model, settings.log_level) == ("own", "debug")


def test_file_named_by_the_variable(toml, monkeypatch):
    monkeypatch.setenv("OCTAVO_CONFIG", str(toml('model = "file"\n')))
    assert Example.load().model == "file"


@pytest.mark.parametrize("text", ["a:1, b:2", '["a:1", "b:2"]'])
def test_lists_in_variables(text, monkeypatch):
    monkeypatch.setenv("OCTAVO_PEERS", text)
    assert Example.load(model="m").peers == ["a:1", "b:2"]


@pytest.mark.parametrize("text", ["[1, ", '["a"'])
def test_broken_lists_in_variables(text, monkeypatch):
    monkeypatch.setenv("OCTAVO_PEERS", text)
    with pytest.raises(SettingsError, match="OCTAVO_PEERS"):
        Example.load(model="m")


@pytest.mark.parametrize("text", ["", "a=1", "{'a': 1}", "[1]", "5", "null", "[" * 100_000])
def test_broken_tables(text):
    with pytest.raises(SettingsError, match=r"--notes: .*(JSON|dictionary)"):
        Example.load(model="m", notes=text)


def test_errors_name_where_it_was_set(toml, monkeypatch):
    with pytest.raises(SettingsError, match=r"--port: .*65535.*'70000'"):
        Example.load(model="m", port="70000")
    with pytest.raises(SettingsError, match=r"--model is required .*OCTAVO_MODEL"):
        Example.load()
    path = toml('model = "m"\nport = "x"\n')
    with pytest.raises(SettingsError, match="TOML key 'port'"):
        Example.load(config=path)
    monkeypatch.setenv("OCTAVO_MODE", "c")
    with pytest.raises(SettingsError, match=r"OCTAVO_MODE: .*'a' or 'b'"):
        Example.load(model="m")


def test_bad_files(toml, tmp_path):
    with pytest.raises(SettingsError, match="No such file"):
        Example.load(config=tmp_path / "none.toml")
    with pytest.raises(SettingsError, match="not valid TOML"):
        Example.load(config=toml("model = "))
    with pytest.raises(SettingsError, match="too deeply"):
        Example.load(config=toml("model = " + "[" * 50_000))
    with pytest.raises(SettingsError, match="5001 digits"):
        Example.load(config=toml("model = " + "1" * 5_001))
    with pytest.raises(SettingsError, match=r"\[router\] has no key 'prot'"):
        Example.load(config=toml("[router]\nprot = 1\n"))


@pytest.fixture
def command():
    seen: list[Example] = []
    app = typer.Typer()

    @app.command()
    @settings_options(Example, hidden={"mode"})
    def run(flags):
        """Does it."""
        seen.append(load(Example, flags))

    def invoke(*arguments: str):
        return CliRunner().invoke(app, list(arguments)), seen

    return invoke


def test_options_are_the_fields(command):
    result, seen = command(
        *("--model", "m", "--port", "7", "--peers", "a", "--peers", "b", "--no-fast"),
        *("--share", "0.5", "--notes", '{"a": [1]}'),
    )
    assert result.exit_code == 0, result.output
    expected = {"port": 7, "peers": ["a", "b"], "fast": False, "share": 0.5, "notes": {"a": [1]}}
    assert seen == [Example(model="m", **expected)]


def test_options_not_given_fall_through(command, monkeypatch):
    monkeypatch.setenv("OCTAVO_FAST", "false")
    monkeypatch.setenv("OCTAVO_PEERS", "x")
    monkeypatch.setenv("OCTAVO_NOTES", '{"a": null}')
    _, seen = command("--model", "m")
    assert (seen[0].fast, seen[0].peers, seen[0].notes) == (False, ["x"], {"a": None})


def test_help_shows_types_and_defaults(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    text = command("--help")[0].output
    assert "The port. [default: 50051]" in text
    assert "The share [0, 1]." in text
    assert "--fast" in text
    assert "--no-fast" in text
    assert "[required]" in text
    assert "--mode " not in text


def test_former_names(command, toml, monkeypatch):
    assert command("--model", "m", "--docking", "7")[1][-1].port == 7
    assert command("--model", "m", "--docking", "7", "--port", "8")[1][-1].port == 8
    assert "docking" not in command("--help")[0].output
    assert Example.load(config=toml("[router]\nmodel = 'm'\ndocking = 5")).port == 5
    monkeypatch.setenv("OCTAVO_DOCKING", "6")
    assert Example.load(config=toml("model = 'm'\ndocking = 5")).port == 6
    monkeypatch.setenv("OCTAVO_DOCKING", "x")
    with pytest.raises(SettingsError, match="OCTAVO_DOCKING"):
        Example.load(model="m")
    monkeypatch.setenv("OCTAVO_PORT", "9")
    assert Example.load(model="m").port == 9


def test_mistakes_are_usage_errors(command):
    result, seen = command("--model", "m", "--port", "x")
    assert result.exit_code == 2
    assert "--port" in result.output
    assert not seen
