"""A fake hub on this machine, with the HTTP interface that downloads use."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LARGE = (".gguf", ".safetensors")
"""Ends of the names of files that the hub keeps in its store of large files."""
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
        gated: Models whose files need the token that is given here.
        renamed: The new names of models, by their old ones.
        damaged: Files whose content is not what their digest says.
        cuts: Bytes of a file after which the connection is cut, once.
        unavailable: Files that are answered with status 503.
        delay: Seconds before a large file is sent.
        asked: The method and path of each request.
        ranges: The parts of files that were asked for.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reset()

    def reset(self) -> None:
        """Forget all models and faults."""
        self.models: dict[str, dict[str, bytes]] = {}
        self.sizes: dict[str, int] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.gated: dict[str, str] = {}
        self.renamed: dict[str, str] = {}
        self.damaged: set[str] = set()
        self.cuts: dict[str, int] = {}
        self.unavailable: set[str] = set()
        self.delay = 0.0
        self.asked: list[str] = []
        self.ranges: list[str] = []

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
        if name in self.server.renamed:
            location = self.path.replace(name, self.server.renamed[name], 1)
            self._send(307, b"", body, Location=location)
            return
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
                | ({"lfs": _lfs(files[file], "oid")} if file.endswith(LARGE) else {})
                for file, size in sizes.items()
            ]
        siblings = [
            {"rfilename": file, "size": size}
            | ({"lfs": _lfs(files[file], "sha256")} if file.endswith(LARGE) else {})
            for file, size in sizes.items()
        ]
        return {"id": name, "modelId": name, "sha": sha_of(name), "siblings": siblings}

    def _send_file(self, name: str, file: str, body: bool) -> None:
        server, data = self.server, self.server.models[name].get(file)
        token = server.gated.get(name)
        if token is not None and self.headers["Authorization"] != f"Bearer {token}":
            self._send(401, b"", body, **{"X-Error-Code": "GatedRepo"})
        elif data is None:
            self._send(404, b"", body, **{"X-Error-Code": "EntryNotFound"})
        elif file in server.unavailable:
            self._send(503, b"", body)
        else:
            etag = sha256_of(data) if file.endswith(LARGE) else _digest(data)
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha_of(name)}
            if file in server.damaged:
                data = data[::-1]
            begin, status = 0, 200
            if body and (part := self.headers["Range"]):
                server.ranges.append(part)
                begin, status = int(part.removeprefix("bytes=").removesuffix("-")), 206
                headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            cut = server.cuts.pop(file, None) if body else None
            if body and file.endswith(LARGE):
                time.sleep(server.delay)
            self._send(status, data[begin:], body, cut, **headers)

    def _send(
        self, status: int, data: bytes, body: bool, cut: int | None = None, **headers: str
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:cut])
            self.close_connection = cut is not None


def _lfs(data: bytes, key: str) -> dict[str, str | int]:
    """Return the hub's description of a large file; its digest has another key in each answer."""
    return {key: sha256_of(data), "size": len(data), "pointerSize": 100}


def sha256_of(data: bytes) -> str:
    """Return the digest of a large file."""
    return hashlib.sha256(data).hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
