"""Engines are the ready Pods of a cluster: an API server over HTTPS speaks lists and watches."""

import asyncio
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from octavo.router.engines import kubernetes
from octavo.router.engines.kubernetes import PodWatch
from octavo.router.settings import RouterSettings
from octavo.v1 import generation_pb2

TARGET = "kubernetes:///app=engine&rank=0:50052"
LABELS = {"app": "engine", "rank": "0"}


class ApiServer(ThreadingHTTPServer):
    """Lists and watches the Pods of one namespace, as Kubernetes' API does.

    Attributes:
        token: The token that it accepts.
        lists: How many lists it has answered.
    """

    daemon_threads = True

    def __init__(self, certificate, key) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.token = "first"
        self.lists = 0
        self.changed = threading.Condition()
        self.pods: dict[str, dict] = {}
        self.events: list[tuple[int, str, dict]] = []
        self.oldest = 0
        self.version = 100
        self.watches = 0

    def put(self, name: str, *, ip: str, ready: bool = True, labels=LABELS, deleted=False) -> None:
        """Add a Pod or change it."""
        with self.changed:
            kind = "MODIFIED" if name in self.pods else "ADDED"
            self.version += 1
            metadata = {"uid": name, "labels": labels, "resourceVersion": str(self.version)}
            if deleted:
                metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            conditions = [{"type": "Ready", "status": str(ready)}]
            pod = {"metadata": metadata, "status": {"podIP": ip, "conditions": conditions}}
            self.pods[name] = pod
            self._tell(kind, pod)

    def delete(self, name: str) -> None:
        with self.changed:
            self.version += 1
            self._tell("DELETED", self.pods.pop(name))

    def _tell(self, kind: str, pod: dict) -> None:
        self.events.append((self.version, kind, pod))
        self.changed.notify_all()

    def end_watches(self, *, forget: bool = False) -> None:
        """End all watches; `forget`: also the events, so that older versions are unknown."""
        with self.changed:
            self.watches += 1
            self.oldest = self.version + 1 if forget else self.oldest
            self.changed.notify_all()


class Handler(BaseHTTPRequestHandler):
    """Answers `GET /api/v1/namespaces/models/pods`."""

    server: ApiServer

    def log_message(self, *_: object) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        status = 200 if url.path == "/api/v1/namespaces/models/pods" else 404
        if self.headers["Authorization"] != f"Bearer {self.server.token}":
            status = 401
        self.send_response(status)
        self.end_headers()
        if status != 200:
            return
        wanted = dict(pair.split("=") for pair in asked["labelSelector"].split(","))
        if asked.get("watch") == "1":
            self._watch(int(asked["resourceVersion"]), wanted)
        else:
            self._list(wanted)

    def _list(self, wanted: dict[str, str]) -> None:
        with self.server.changed:
            self.server.lists += 1
            found = [pod for pod in self.server.pods.values() if fits(pod, wanted)]
            answer = {"metadata": {"resourceVersion": str(self.server.version)}, "items": found}
        self.wfile.write(json.dumps(answer).encode())

    def _watch(self, version: int, wanted: dict[str, str]) -> None:
        server = self.server
        with server.changed:
            if version < server.oldest:
                gone = {"kind": "Status", "code": 410, "reason": "Expired"}
                self._send("ERROR", gone)
                return
            current = server.watches
            while server.watches == current:
                for number, kind, pod in server.events:
                    if number > version and fits(pod, wanted):
                        metadata = {**pod["metadata"], "resourceVersion": str(number)}
                        self._send(kind, {**pod, "metadata": metadata})
                if server.version > version:
                    version = server.version
                    self._send("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})
                server.changed.wait()

    def _send(self, kind: str, thing: dict) -> None:
        self.wfile.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")
        self.wfile.flush()


def fits(pod: dict, wanted: dict[str, str]) -> bool:
    return wanted.items() <= pod["metadata"]["labels"].items()


@pytest.fixture
def api(authority, tmp_path, monkeypatch):
    server = ApiServer(*authority.issue("api", "ip:127.0.0.1"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    account = tmp_path / "account"
    account.mkdir()
    (account / "ca.crt").write_bytes(authority.ca.read_bytes())
    (account / "namespace").write_text("models")
    (account / "token").write_text(server.token)
    monkeypatch.setattr(kubernetes, "SERVICE_ACCOUNT", account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
    yield server
    server.end_watches()
    server.shutdown()
    server.server_close()


async def until(found, *hosts: str) -> None:
    """Read a watch until it has these Pods and no others."""
    async with asyncio.timeout(10):
        async for addresses in found:
            if addresses == {f"{host}:50052" for host in hosts}:
                return


async def test_ready_pods_with_the_labels_are_found(api):
    api.put("a", ip="10.0.0.1")
    api.put("other", ip="10.0.0.9", labels={"app": "engine", "rank": "1"})
    api.put("loading", ip="10.0.0.2", ready=False)
    found = PodWatch(TARGET).addresses()
    await until(found, "10.0.0.1")
    api.put("loading", ip="10.0.0.2")
    await until(found, "10.0.0.1", "10.0.0.2")
    api.put("a", ip="10.0.0.1", deleted=True)
    await until(found, "10.0.0.2")
    api.delete("a")
    api.put("loading", ip="10.0.0.2", ready=False)
    await until(found)
    await found.aclose()


async def test_a_watch_that_ends_goes_on_from_its_version(api):
    found = PodWatch(TARGET).addresses()
    await until(found)
    for number in range(3):
        api.put("a", ip=f"10.0.0.{number}")
        await until(found, f"10.0.0.{number}")
        api.end_watches()
    assert api.lists == 1
    (kubernetes.SERVICE_ACCOUNT / "token").write_text("renewed")
    api.token = "renewed"
    api.put("a", ip="10.0.0.9")
    api.end_watches()
    await until(found, "10.0.0.9")
    assert api.lists == 1
    await found.aclose()


async def test_what_ends_a_watch_is_an_error(api, authority, impostor):
    for broken in ("version", "token", "authority"):
        found = PodWatch(TARGET).addresses()
        await until(found)
        if broken == "version":
            api.end_watches(forget=True)
        elif broken == "token":
            api.token = "another"
            api.end_watches()
        else:
            (kubernetes.SERVICE_ACCOUNT / "ca.crt").write_bytes(impostor.ca.read_bytes())
            found = PodWatch(TARGET).addresses()
        with pytest.raises(OSError, match=f"127.0.0.1:{api.server_port}"):
            await until(found, "10.0.0.1")
        api.token = "first"


async def test_a_router_serves_by_pods_through_failures_of_the_api(api, scripted, serve):
    engine = await scripted().start()
    port = engine.address.rpartition(":")[2]
    target = f"kubernetes:///app=engine:{port}"
    async with serve(addresses=[target], dns_interval=0.1) as s:
        assert not s.router.pool.up()
        api.put("a", ip="127.0.0.1")
        await s.until(s.router.pool.up)
        lists = api.lists
        api.token = "another"  # nobody's: what was found stays
        api.end_watches()
        await asyncio.sleep(0.3)
        call = s.stub.Generate(generation_pb2.GenerateRequest(text="prompt"))
        assert "".join([each.delta.text async for each in call]) == "hello world"
        api.token = "first"
        await s.until(lambda: api.lists > lists)
        api.delete("a")
        await s.until(lambda: not s.router.pool.links)
    await engine.kill()


def test_outside_of_a_cluster_the_error_says_so(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(OSError, match="runs outside a Pod"):
        PodWatch(TARGET)


@pytest.mark.parametrize(
    "engine",
    ["kubernetes:///app:1", "kubernetes:///a=b", "kubernetes:///a=b:0", "kubernetes://a=b:1"],
)
def test_other_targets_are_refused(engine):
    with pytest.raises(ValueError, match="neither HOST:PORT"):
        RouterSettings(engine=[engine])


def test_labels_survive_the_environment(monkeypatch):
    monkeypatch.setenv("OCTAVO_ENGINE", f"{TARGET},127.0.0.1:1")
    assert RouterSettings.load().engine == [TARGET, "127.0.0.1:1"]
