"""A fake hub on this machine, with the HTTP interface that downloads use."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "0123456789abcdef0123456789abcdef01234567"


def sha_of(name: str) -> str:
    """Return the commit of a model, or of its branch."""
    return _digest(name.encode()) if "@" in name else SHA


class Hub(ThreadingHTTPServer):
    """Serve models by name.

    Attributes:
        models: Each model's files, by NAME, or NAME@BRANCH for another branch.
        sizes: False sizes to report, by file name.
        refusals: A status and an error code to answer, by model name.
        asked: The method and path of each request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: dict[str, dict[str, bytes]] = {}
        self.sizes: dict[str, int] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.asked: list[str] = []

    @property
    def endpoint(self) -> str:
        """The value of HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub within the block."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
        else:
            name, rest = "/".join(parts[:2]), parts[2:]
        revision = rest[1] if rest[:1] in (["resolve"], ["revision"], ["tree"]) else "main"
        if name in self.server.models and revision not in {"main", SHA}:
            branches = {sha_of(own): own for own in self.server.models if "@" in own}
            name = branches.get(revision, f"{name}@{revision}")
            if name not in self.server.models:
                self._send(404, b"{}", body, **{"X-Error-Code": "RevisionNotFound"})
                return
        if name in self.server.refusals:
            status, code = self.server.refusals[name]
            self._send(status, b"{}", body, **{"X-Error-Code": code})
        elif name not in self.server.models:
            self._send(404, b"{}", body, **{"X-Error-Code": "RepoNotFound"})
        elif rest[:1] == ["resolve"]:
            self._send_file(name, "/".join(rest[2:]), body)
        else:
            self._send(200, json.dumps(self._listing(name, rest)).encode(), body)

    def _listing(self, name: str, rest: list[str]) -> object:
        """Return the hub's description of a model, or its files."""
        files = self.server.models[name]
        sizes = {file: self.server.sizes.get(file, len(data)) for file, data in files.items()}
        if rest[:1] == ["tree"]:
            return [
                {"type": "file", "path": file, "size": size, "oid": _digest(files[file])}
                for file, size in sizes.items()
            ]
        siblings = [{"rfilename": file, "size": size} for file, size in sizes.items()]
        return {"id": name, "modelId": name, "sha": sha_of(name), "siblings": siblings}

    def _send_file(self, name: str, file: str, body: bool) -> None:
        data = self.server.models[name].get(file)
        if data is None:
            self._send(404, b"", body, **{"X-Error-Code": "EntryNotFound"})
        else:
            headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": sha_of(name)}
            self._send(200, data, body, **headers)

    def _send(self, status: int, data: bytes, body: bool, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
