"""`octavo bench --url` against an HTTP server with answers from each test."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.cli.bench.report import from_json
from octavo.cli.bench.settings import openai_base_url

SIZES = ("--prompt-tokens", "7", "--output-tokens", "3", "--warmup", "0")
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
DONE = b"data: [DONE]\n\n"


def event(**chunk) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def text(said: str) -> bytes:
    return event(choices=[{"text": said, "index": 0}], usage=None)


def spoken(**delta) -> bytes:
    return event(choices=[{"delta": delta, "index": 0}])


WHOLE = (text("a"), text("b"), text(""), event(choices=[], usage=USAGE), DONE)
CHAT = (
    spoken(role="assistant", content=""),
    spoken(reasoning_content="a"),
    spoken(content="b"),
    event(choices=[], usage=USAGE),
    DONE,
)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.keys.append(self.headers.get("Authorization"))
        self._send(self.server.models_status, json.dumps(self.server.models).encode())

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        self.server.requests.append((self.path, json.loads(self.rfile.read(length))))
        if self.server.status != 200:
            self._send(self.server.status, self.server.body, **self.server.headers)
            return
        self.send_response(200)
        self.send_header("Content-Type", self.server.kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in self.server.parts:
            time.sleep(self.server.pause)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()
        if self.server.breaks:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # clients that leave a broken stream
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.keys, server.requests, server.headers = [], [], {}
    server.models_status = 200
    server.models = {"data": [{"id": "m", "max_model_len": 100}, {"id": "other"}]}
    server.status, server.body, server.parts = 200, b"", WHOLE
    server.kind, server.pause, server.breaks = "text/event-stream; charset=utf-8", 0, False
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def bench(server):
    def run(command: str, *arguments: str):
        flags = ["--url", server.url, "--json", "-", *SIZES, *arguments]
        return CliRunner().invoke(app, ["bench", command, *flags])

    return run


def failures(result) -> dict[str, int]:
    return from_json(result.stdout).runs[0].figures.errors


def test_what_is_sent_and_reported(bench, server):
    result = bench("serve", "--rate", "50", "100", "-r", "4", "--api-key", "secret")
    assert result.exit_code == 0, result.stderr
    assert set(server.keys) == {"Bearer secret"}
    paths, bodies = zip(*server.requests, strict=True)
    assert set(paths) == {"/v1/completions"}
    for body in bodies:
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 3, 0)
        assert body["stream"]
        assert body["ignore_eos"]
        assert body["stream_options"] == {"include_usage": True}
        assert len(body["prompt"]) == 7
    slow, fast = (bodies[:4], bodies[4:])
    rests = [{tuple(body["prompt"][1:]) for body in part} for part in (slow, fast)]
    assert rests[0] == rests[1]  # the same work for each rate
    firsts = [{body["prompt"][0] for body in part} for part in (slow, fast)]
    assert len(firsts[0]) == len(firsts[1]) == 1  # but without prefix cache hits
    assert firsts[0] != firsts[1]
    report = from_json(result.stdout)
    assert report.target.url == server.url
    for run in report.runs:
        figures = run.figures
        assert (figures.requests, figures.input_tokens, figures.output_tokens) == (4, 28, 12)
        assert figures.cached_tokens == 8
        assert figures.tokens_per_message == 1.5  # two messages had text
        assert 0 < figures.ttft.p50 <= figures.e2e.p50
        assert figures.normalized.p50 == pytest.approx(figures.e2e.p50 / 3)
    assert "normalized" in result.stderr


def test_a_chat(bench, server, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "d"}]}\n{"prompt": "e"}\n')
    server.parts = CHAT
    flags = ("--dataset", str(path), "--output-tokens", "9", "--model", "other")
    result = CliRunner().invoke(
        app, ["bench", "throughput", "--url", server.url, "--json", "-", "--warmup", "0", *flags]
    )
    assert result.exit_code == 0, result.stderr
    sent = dict(server.requests)
    chat = sent["/v1/chat/completions"]
    assert chat["messages"] == [{"role": "user", "content": "d"}]
    assert chat["model"] == "other"
    assert "ignore_eos" not in chat
    assert sent["/v1/completions"]["prompt"] == "e"
    (run,) = from_json(result.stdout).runs
    assert all(len(record.message_times) == 2 for record in run.records)  # reasoning and content


@pytest.mark.parametrize(
    ("status", "headers", "code", "shown", "exit_code"),
    [
        (401, {}, "401 UNAUTHORIZED", "bad key", 1),
        (429, {"Retry_After": "7"}, "429 TOO_MANY_REQUESTS", "bad key (Retry-After: 7)", 1),
        (503, {}, "503 SERVICE_UNAVAILABLE", "bad key", 1),
    ],
)
def test_refusals(bench, server, status, headers, code, shown, exit_code):
    server.status, server.headers = status, headers
    server.body = b'{"error": {"message": "bad key", "type": "x"}}'
    result = bench("throughput", "-r", "3")
    assert failures(result) == {code: 3}
    assert f"3 \N{MULTIPLICATION SIGN} {code}: {shown}" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.exit_code == exit_code
    assert len(server.requests) == 3  # none is retried


def test_some_are_refused_under_load(bench, server, monkeypatch):
    """An overloaded server's errors do not fail the benchmark if some requests succeed."""
    send = Handler.do_POST

    def refuse_two(handler):
        handler.server.status = 429 if len(handler.server.requests) in {1, 2} else 200
        send(handler)

    monkeypatch.setattr(Handler, "do_POST", refuse_two)
    result = bench("throughput", "-r", "5", "-c", "1")
    assert failures(result) == {"429 TOO_MANY_REQUESTS": 2}
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("parts", "breaks", "code", "shown"),
    [
        ((text("a"),), True, "STREAM_BROKEN", ""),
        ((text("a"), event(choices=[], usage=USAGE)), False, "STREAM_BROKEN", "without [DONE]"),
        ((text("a"), b"data: {oh\n\n", DONE), False, "STREAM_BROKEN", "not a JSON object"),
        ((text("a"), event(error={"message": "engine died"}), DONE), False, "STREAM_ERROR", "died"),
        ((text("a"), DONE), False, "NO_USAGE", "no usage"),
    ],
)
def test_broken_streams(bench, server, parts, breaks, code, shown):
    server.parts, server.breaks = parts, breaks
    result = bench("throughput", "-r", "2")
    assert failures(result) == {code: 2}
    assert shown in result.stderr
    assert "Traceback" not in result.stderr
    assert result.exit_code == 1


def test_an_answer_that_is_no_stream(bench, server):
    server.kind = "text/html"
    assert failures(bench("throughput", "-r", "2")) == {"STREAM_BROKEN": 2}


def test_a_deadline(bench, server):
    server.pause = 0.5
    result = bench("throughput", "-r", "2", "--timeout", "0.2")
    assert failures(result) == {"DEADLINE_EXCEEDED": 2}
    assert "no answer within 0.2 s" in result.stderr


def test_a_server_that_goes_away(bench, server):
    """The server lists its models, then stops listening."""
    serve_models = Handler.do_GET

    class Leaving(Handler):
        def do_GET(self):
            # Shut down first, as a request might come before; a closed socket still listens until
            # the server's thread stops waiting for it.
            self.server.socket.shutdown(socket.SHUT_RDWR)
            self.server.socket.close()
            serve_models(self)
            self.close_connection = True

    server.RequestHandlerClass = Leaving
    result = bench("throughput", "-r", "3")
    assert failures(result) == {"CONNECTION_FAILED": 3}
    assert result.exit_code == 1


def test_nobody_there():
    result = CliRunner().invoke(app, ["bench", "latency", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "nothing answers at http://127.0.0.1:1/v1" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("status", "models", "flags", "shown"),
    [
        (401, {"detail": "who are you"}, (), "401 UNAUTHORIZED: who are you; set the API key"),
        (404, {}, (), "404 NOT_FOUND"),
        (200, {"models": []}, (), "not a list of models"),
        (200, {"data": []}, (), "no model is served yet"),
        (200, {"data": [{"id": "m"}]}, ("--model", "n"), "no model 'n'; served: m"),
    ],
)
def test_no_model(bench, server, status, models, flags, shown):
    server.models_status, server.models = status, models
    result = bench("throughput", "-r", "1", *flags)
    assert result.exit_code == 1
    assert shown in " ".join(result.stderr.split())
    assert not server.requests


def test_a_named_model_of_a_server_without_a_list(bench, server):
    server.models_status = 404
    result = bench("throughput", "-r", "1", "--model", "hidden")
    assert result.exit_code == 0, result.stderr
    assert server.requests[0][1]["model"] == "hidden"


def test_lengths_that_exceed_the_context(bench, server):
    result = bench("throughput", "--prompt-tokens", "99", "--output-tokens", "9")
    assert result.exit_code == 2
    assert "exceed the 100 of m" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--url", "localhost:8000"), "must be http://HOST:PORT"),
        (("--url", "http://me:pw@h"), "no user"),
        (("--url", "http://h:port"), "--url"),
        (("--url", "http://h", "--serve", "demo"), "exclude each other"),
        (("--url", "http://h", "--tls"), "are for gRPC"),
    ],
)
def test_impossible_flags(flags, complaint, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    result = CliRunner().invoke(app, ["bench", "latency", *flags])
    assert result.exit_code == 2
    assert complaint in result.stderr


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("https://h/", "https://h/v1"),
        ("http://h/v1/", "http://h/v1"),
        ("http://h/openai/v1", "http://h/openai/v1"),
    ],
)
def test_base_urls(url, base):
    assert openai_base_url(url) == base
