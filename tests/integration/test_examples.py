"""The programs of examples/; that of OpenAI's client is in test_http.py."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, served):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, served.address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_many_at_once(served):
    out = run("many_at_once.py", served)
    assert "'The capital of France is Paris.', 8 tokens\n" in out
    drafts = re.findall(r"^draft (\d): (.*) \((?:length|eos)\)$", out, re.MULTILINE)
    assert [index for index, _ in drafts] == ["0", "1", "2", "3"]
    assert len({text for _, text in drafts}) > 1


def test_call_a_tool(served):
    place, call, *answer = run("call_a_tool.py", served).splitlines()
    assert re.fullmatch("asked about (Paris|Rome|Berlin)", place)
    assert re.fullmatch(r'get_weather\(\{"city": ".*"\}\)', call)
    assert "".join(answer)


def test_deadlines_and_failures(served):
    sentence, numbers, *rest = run("deadlines_and_failures.py", served).splitlines()[-4:]
    assert sentence.endswith(".")
    assert numbers.startswith(" 4")
    assert rest[0].startswith("invalid: sampling.temperature: ")
    assert rest[1] in {"deadline: DEADLINE_EXCEEDED", "deadline: RESOURCE_EXHAUSTED"}
