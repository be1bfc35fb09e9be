"""`octavo batch` with a server that it starts: answers, errors, kills and what comes after them."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.integration.conftest import SMALL

KILLS = 5


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def request(number, **body):
    body = {"model": "demo", "prompt": f"Number {number}:", "max_tokens": 4} | body
    body = {"temperature": 0, "ignore_eos": True} | body
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


def run(tmp_path, *flags, **options):
    command = [sys.executable, "-m", "octavo", "batch", str(tmp_path / "in.jsonl")]
    command += [str(tmp_path / "out.jsonl"), "--in-flight", "8", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


def write(tmp_path, requests):
    texts = [each if isinstance(each, str) else json.dumps(each) for each in requests]
    (tmp_path / "in.jsonl").write_text("\n\n".join(texts) + "\n")


def test_answers_and_errors_in_order(served, tmp_path):
    chat = {"messages": [{"role": "user", "content": "Name a river."}]}
    ask = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
    requests = [
        *map(request, range(20)),
        ask | {"body": {"model": "demo", "max_tokens": 4, **chat}},
        request(21, temperature=-1),
        "{not JSON",
        request(23, stream=True),
        request(24) | {"url": "/v1/no-such"},
        request(25) | {"method": "GET"},
        request(26, max_tokens=40),
        request(27),
    ]
    write(tmp_path, requests)
    with run(tmp_path, "--url", served.http) as batch:
        assert batch.wait(120) == 1
        assert "23 completed, 5 failed" in batch.stderr.read()
    answers, errors = lines(tmp_path / "out.jsonl"), lines(tmp_path / "out.errors.jsonl")
    ids = [f"r{number}" for number in range(20)]
    assert [each["custom_id"] for each in answers] == [*ids, "c", "r26", "r27"]
    assert all(each["response"]["body"]["usage"]["completion_tokens"] for each in answers)
    assert [each["custom_id"] for each in errors] == ["r21", None, "r23", "r24", "r25"]
    assert "temperature" in errors[0]["response"]["body"]["error"]["message"]
    assert "not JSON" in errors[1]["error"]["message"]
    assert "stream" in errors[2]["error"]["message"]
    assert errors[3]["response"]["status_code"] == 404
    # A second run has nothing to do; other requests are not continued.
    with run(tmp_path, "--url", served.http) as batch:
        assert batch.wait(60) == 0
        assert "0 completed, 0 failed, 28 before" in batch.stderr.read()
    write(tmp_path, [*requests[:27], request(99)])
    with run(tmp_path, "--url", served.http) as batch:
        assert batch.wait(60) == 1
        assert "of other requests" in batch.stderr.read()


def test_killed_at_any_moment_it_goes_on(served, tmp_path):
    write(tmp_path, map(request, range(300)))
    out = tmp_path / "out.jsonl"
    for number in range(KILLS):
        with run(tmp_path, "--url", served.http) as batch:
            until = time.monotonic() + 60
            more = len(out.read_bytes().splitlines()) + 13 if out.exists() else 1
            while not out.exists() or len(out.read_bytes().splitlines()) < more:
                assert batch.poll() is None
                assert time.monotonic() < until
                time.sleep(0.003 * number)
            batch.kill()
        with out.open("ab") as file:
            file.write(b'{"id": "torn' * (number % 2))  # as if killed in the middle of a line
    with run(tmp_path, "--url", served.http) as batch:
        assert batch.wait(120) == 0
    answers = lines(out)
    assert [each["custom_id"] for each in answers] == [f"r{number}" for number in range(300)]


@pytest.mark.slow
def test_a_server_of_its_own_ends_with_it(demo_model, tmp_path):
    write(tmp_path, [request(number, max_tokens=100) for number in range(100)])
    flags = ["--serve", "demo", "--", *SMALL]
    with run(tmp_path, *flags) as batch:
        while not (tmp_path / "out.jsonl").exists() or not lines(tmp_path / "out.jsonl"):
            time.sleep(0.1)
        batch.send_signal(signal.SIGINT)
        assert batch.wait(60) == 130
    done = len(lines(tmp_path / "out.jsonl"))
    assert 0 < done < 100
    with run(tmp_path, *flags) as batch:
        assert batch.wait(240) == 0
    assert len(lines(tmp_path / "out.jsonl")) == 100
    with run(tmp_path, "--serve", "no/such-model") as batch:
        assert batch.wait(60) == 1
        assert "no/such-model" in batch.stderr.read()
