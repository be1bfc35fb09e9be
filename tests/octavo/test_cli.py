"""The commands, in this process, against a scripted service."""

import json
import re
import subprocess
import sys

import grpc
import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.cli.chat import FALLBACKS
from octavo.cli.parameter_flags import FLAGS, describe
from octavo.common.sampling_parameters import PARAMETERS, TYPES
from octavo.router.tenants.tenant import hash_key, read_tenants
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import sampling_pb2
from tools import flag_table

runner = CliRunner()


@pytest.fixture
def octavo(service):
    def run(*arguments: str, stdin: str | None = None):
        return runner.invoke(app, [*arguments, "--address", service.address], input=stdin)

    return run


def test_generate(octavo, service):
    result = octavo("generate", "a b", "--system", "s", "-t", "0", "--stop", "x", "--stop", "y")
    assert result.exit_code == 0
    assert result.stdout == "a b \n"
    assert "3 + 2 tokens in" in result.stderr
    (request,) = service.requests
    assert [m.role for m in request.chat.messages] == ["system", "user"]
    assert list(request.stop.strings) == ["x", "y"]
    assert request.sampling.temperature == 0
    assert not request.sampling.HasField("top_p")


@pytest.mark.parametrize("name", FLAGS)
def test_generate_sends_every_parameter_that_has_a_flag(octavo, service, name, tmp_path):
    parameter, kind = PARAMETERS[name], str(TYPES[name])
    if parameter.path.startswith("chat."):
        pytest.skip("test_generate_with_tools has those of a chat")
    value = () if "bool" in kind else ("2",) if "int" in kind or "float" in kind else ("x",)
    if parameter.file:
        value = (str(tmp_path / "x"),)
        (tmp_path / "x").write_text("x")
    result = octavo("generate", "a", parameter.shown_flags(name)[0], *value)
    assert result.exit_code == 0, result.output
    message = service.requests[0]
    for part in parameter.message.split(".") if parameter.message else ():
        message = getattr(message, part)
    given = True if "bool" in kind else 2 if value == ("2",) else "x"
    assert getattr(message, parameter.field) in (given, [given])


CALL = pb.ToolCallDelta(id="a", name="time", arguments='{"zone": "CET"}')


def test_generate_with_tools(octavo, service, tmp_path):
    (tmp_path / "tools.json").write_text('[{"name": "time"}]')
    service.deltas = [pb.Delta(reasoning="It is [b]late[/b]."), pb.Delta(tool_calls=[CALL])]
    arguments = ("--tools", str(tmp_path / "tools.json"), "--tool-choice", "time")
    result = octavo("generate", "a", *arguments)
    assert result.exit_code == 0, result.output
    assert 'time({"zone": "CET"})' in result.stdout
    assert "It is [b]late[/b]." not in result.stdout
    assert "It is [b]late[/b]." in result.stderr
    (request,) = service.requests
    assert [tool.name for tool in request.chat.tools] == ["time"]
    assert request.chat.tool_choice.name == "time"
    (output,) = json.loads(octavo("generate", "a", "--json").stdout)["outputs"]
    assert output["tool_calls"] == [{"id": "a", "name": "time", "arguments": '{"zone": "CET"}'}]


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [("--tools", "[", "line 1"), ("--json-schema", None, "No such file")],
)
def test_files_that_cannot_be_used(octavo, tmp_path, flag, text, message):
    if text is not None:
        (tmp_path / "file").write_text(text)
    result = octavo("generate", "a", flag, str(tmp_path / "file"))
    assert result.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", result.stderr)


def test_chat_shows_reasoning_and_keeps_it(octavo, service, tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    service.deltas = [pb.Delta(reasoning="hm"), pb.Delta(text="{}")]
    flags = ("--json-schema", str(tmp_path / "schema.json"))
    result = octavo("chat", *flags, stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stdout == "{}\n{}\n"
    assert result.stderr.count("hm\n") == 2
    assert service.requests[0].constraint.json_schema == '{"type": "object"}'
    answer = service.requests[1].chat.messages[1]
    assert (answer.content, answer.reasoning) == ("{}", "hm")


@pytest.mark.parametrize(
    ("own", "flags", "expected"),
    [
        ({}, (), {"temperature": 0.75, "top_p": 0.5}),
        ({}, ("-t", "0"), {"temperature": 0, "top_p": 0.5}),
        ({"temperature": 0.5}, (), {}),
        ({"top_k": 20}, ("-t", "1"), {"temperature": 1}),
    ],
)
def test_chat_samples_as_the_model_says_or_as_it_likes(
    octavo, service, monkeypatch, own, flags, expected
):
    monkeypatch.setitem(FALLBACKS, "temperature", 0.75)  # values that float32 represents exactly
    monkeypatch.setitem(FALLBACKS, "top_p", 0.5)
    service.models = [pb.ModelCard(name="m", default_sampling=own)]
    assert octavo("chat", *flags, stdin="hi\n").exit_code == 0
    assert service.requests[0].sampling == sampling_pb2.SamplingParams(**expected)


def test_help_says_whose_default_there_is():
    for command, default in (("generate", "else 1."), ("chat", "else 0.7.")):
        text = " ".join(
            runner.invoke(app, [command, "--help"], env={"COLUMNS": "300"}).output.split()
        )
        assert f"Default: the model's, {default}" in text
    assert describe(PARAMETERS["priority"]).endswith("Default 0.")


def test_generate_raw_json_from_stdin(octavo, service):
    result = octavo("generate", "-", "--raw", "--json", "-n", "2", stdin="a b")
    assert [o["text"] for o in json.loads(result.stdout)["outputs"]] == ["a b ", "a b "]
    assert service.requests[0].text == "a b"


def test_generate_several_outputs_do_not_mix(octavo):
    assert octavo("generate", "a b", "-n", "2").stdout == "── 0 ──\na b \n── 1 ──\na b \n"


def test_generate_prints_errors(octavo, service, bad_request, retry_info):
    service.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", bad_request, retry_info)
    result = octavo("generate", "a")
    assert result.exit_code == 1
    assert "RESOURCE_EXHAUSTED: full" in result.stderr
    assert "stop: too many" in result.stderr
    assert "try again in 1.5 s" in result.stderr


def test_a_key_and_the_tenant_it_is_for(tmp_path):
    result = runner.invoke(app, ["key", "alice"])
    key, *table = result.stdout.splitlines()
    file = tmp_path / "tenants.toml"
    file.write_text("\n".join(table))
    (tenant,) = read_tenants(file)
    assert (tenant.name, tenant.keys) == ("alice", (hash_key(key),))
    assert len(key) > 40
    assert runner.invoke(app, ["key"]).stdout.splitlines()[0] != key
    assert runner.invoke(app, ["key", "a b"]).exit_code == 2


def test_nobody_there():
    result = runner.invoke(app, ["status", "--address", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "octavo serve demo" in result.stderr


def test_chat_sends_what_was_said(octavo, service):
    lines = "hello\nmore\n/system S\nagain\n/reset\nnew\n/nonsense\n/quit\nunread\n"
    result = octavo("chat", stdin=lines)
    assert result.exit_code == 0
    said = [[m.content for m in request.chat.messages] for request in service.requests]
    assert said == [["hello"], ["hello", "hello ", "more"], ["S", "again"], ["S", "new"]]
    assert "unknown command /nonsense" in result.stderr


def test_chat_takes_a_failed_question_back(octavo, service):
    service.fail(grpc.StatusCode.UNAVAILABLE, "away", listing=False)
    result = octavo("chat", stdin="hello\nagain\n")
    assert result.exit_code == 0
    assert "UNAVAILABLE: away" in result.stderr
    assert [len(request.chat.messages) for request in service.requests] == [1, 1]


def test_chat_checks_the_server_before_the_first_line(octavo, service):
    service.fail(grpc.StatusCode.UNAUTHENTICATED, "who?")
    result = octavo("chat", stdin="hello\n")
    assert result.exit_code == 1
    assert "OCTAVO_API_KEY" in result.stderr
    assert not service.requests
    gone = runner.invoke(app, ["chat", "--address", "127.0.0.1:1"])
    assert gone.exit_code == 1
    assert "octavo serve demo" in gone.stderr


def test_chat_says_that_no_model_is_served_yet(octavo, service):
    service.models.clear()
    result = octavo("chat", stdin="/quit\n")
    assert result.exit_code == 0
    assert "no model is served yet" in result.stderr


def test_status(octavo):
    shown = json.loads(octavo("status", "--json").stdout)
    assert shown["serving"]
    assert shown["models"][0]["total_blocks"] == 10
    once = octavo("status", "--once").stdout
    assert "6/10" in once
    assert "60%" in once
    assert once.split()[-4:] == ["2", "3", "5/8", "12.5%"]  # shared, cached, in swap, waste


def test_status_shows_what_slows_engines_down(octavo, service):
    service.models[0].warnings.append("there is no [C++] compiler: install g++")
    assert "warning: there is no [C++] compiler: install g++" in octavo("status", "--once").stdout
    (model,) = json.loads(octavo("status", "--json").stdout)["models"]
    assert model["warnings"] == ["there is no [C++] compiler: install g++"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["engine", "--model", "x", "--port", "99999"], "--port"),
        (["engine", "--model", "x", "--device", "abacus"], "--device"),
        (["engine"], "--model is required"),
        (["engine", "x", "--model", "y"], "the model is given twice: 'x' and --model 'y'"),
        (["serve", "x", "--model", "y"], "the model is given twice: 'x' and --model 'y'"),
        (["engine", "x", "--num-blocks", "many"], "--num-blocks"),
        (["router", "--engine", "nowhere"], "--engine"),
        (["serve", "--model", "x", "--config", "/none.toml"], "/none.toml"),
    ],
)
def test_wrong_settings_are_usage_errors(arguments, expected, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert expected in result.stderr


def test_wrong_variable_is_named(monkeypatch):
    monkeypatch.setenv("OCTAVO_NUM_BLOCKS", "many")
    result = runner.invoke(app, ["engine", "--model", "x"])
    assert result.exit_code == 2
    assert "OCTAVO_NUM_BLOCKS" in result.stderr


def test_commands_start_without_torch():
    code = (
        "import sys, octavo.cli; "
        "print([m for m in ('torch', 'transformers', 'octavo.engine.server') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version():
    assert runner.invoke(app, ["--version"]).stdout.startswith("octavo 0.")


COMMANDS = [
    *([name] for name in ("serve", "router", "engine", "generate", "chat", "status", "health")),
    *([], ["demo"], ["key"], ["bench"], ["bench", "throughput"]),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_names_types_plainly(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = runner.invoke(app, [*command, "--help"]).stdout
    options = re.findall(r"^│[ *]+--?\w.*$", text, re.MULTILINE)
    assert options
    for odd in ("<", "BOOL", "ON|OFF"):
        assert not [line for line in options if odd in line]


def test_paragraphs_of_help_are_broken_where_the_terminal_ends(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    usage, *lines = runner.invoke(app, ["serve", "--help"]).stdout.strip().splitlines()
    assert usage.strip().endswith("serve [OPTIONS] [MODEL]...")
    prose = [line for line in lines if line.strip() and not line.startswith(("│", "╭", "╰"))]
    assert len([line for line in prose if "--metrics-port" in line or "MODEL is" in line]) == 1


def test_help_of_serve_has_the_flags_of_its_tables(monkeypatch):
    """Titles in docs/flags.md name the commands that have the flags."""
    monkeypatch.setenv("COLUMNS", "200")
    shown = set(re.findall(r"(?<=│ )--[\w-]+", runner.invoke(app, ["serve", "--help"]).stdout))
    tables = re.split(r"^## ", flag_table.reference(), flags=re.MULTILINE)[1:]
    listed = {
        name
        for table in tables
        if "`serve`" in table.splitlines()[0]
        for name in re.findall(r"^\| `(--[\w-]+)", table, re.MULTILINE)
    }
    assert shown - {"--help"} == listed
