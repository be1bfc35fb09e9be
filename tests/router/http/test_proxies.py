"""Routers behind Debian's nginx and HAProxy: no stream is cut, and no request fails."""

import asyncio
import contextlib
import shutil
import subprocess
from collections import Counter

import grpc
import grpc.aio
import httpx
import pytest

from octavo.common.ports import free_port
from octavo.v1 import generation_pb2, generation_pb2_grpc
from tests.integration.harness import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("nginx"), reason="needs nginx"),
    pytest.mark.skipif(not shutil.which("haproxy"), reason="needs HAProxy"),
]

NGINX = """
worker_processes 1;
pid {directory}/nginx.pid;
error_log stderr;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {directory};
    proxy_temp_path {directory};
    fastcgi_temp_path {directory};
    uwsgi_temp_path {directory};
    scgi_temp_path {directory};
    upstream routers {{ {servers} keepalive 16; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://routers;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_read_timeout 30s;
            proxy_next_upstream error http_503 non_idempotent;
        }}
    }}
}}
"""
HAPROXY = """
defaults
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    timeout check 2s
    retries 3
    option redispatch
frontend http
    mode http
    bind 127.0.0.1:{http}
    default_backend http_routers
backend http_routers
    mode http
    option httpchk GET /health
    default-server check inter 200 fall 1 rise 1
{http_servers}
frontend grpc
    mode tcp
    bind 127.0.0.1:{grpc}
    default_backend grpc_routers
backend grpc_routers
    mode tcp
    option httpchk GET /health
    default-server check inter 200 fall 1 rise 1
{grpc_servers}
"""


@contextlib.contextmanager
def proxy(directory, text: str, *command: str):
    """Run a proxy with a configuration; it must not end by itself."""
    path = directory / f"{command[0]}.conf"
    path.write_text(text)
    with (directory / f"{command[0]}.log").open("wb") as log:
        process = subprocess.Popen([*command, str(path)], stdout=log, stderr=log)
    try:
        yield
        assert process.poll() is None, (directory / f"{command[0]}.log").read_text()
    finally:
        process.terminate()
        process.wait()


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def nginx(directory, port: int, *ports: int):
    """Run nginx at a port, as a proxy of routers."""
    servers = " ".join(f"server 127.0.0.1:{one} max_fails=0;" for one in ports)
    text = NGINX.format(directory=directory, port=port, servers=servers)
    return proxy(directory, text, "nginx", "-g", "daemon off;", "-c")


async def stream(client: httpx.AsyncClient, url: str) -> str:
    """Return a streamed answer's text, or the error."""
    body = {"prompt": "x", "max_tokens": 100, "stream": True}
    try:
        answer = await client.post(f"{url}/v1/completions", json=body, timeout=200)
    except httpx.HTTPError as error:
        return repr(error)
    return answer.text if answer.status_code == 200 else f"{answer.status_code} {answer.text}"


async def test_no_stream_of_a_saturated_router_is_cut(frontend, scripted, tmp_path):
    """nginx cuts streams that are silent for 30 s; the last stream waits over a minute."""
    engine = scripted("a long answer" * 2, interval=0.12, max_num_seqs=1)
    async with frontend(engine) as (app, _):
        port = free_port()
        before = nginx(tmp_path, port, int(app.url.rpartition(":")[2]))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits) as client:
            with before:
                await asyncio.sleep(0.5)
                began = asyncio.get_running_loop().time()
                streams = [stream(client, f"http://127.0.0.1:{port}") for _ in range(50)]
                answers = await asyncio.gather(*streams)
                assert asyncio.get_running_loop().time() - began > 60
    assert [answer for answer in answers if not answer.endswith("data: [DONE]\n\n")] == []


class Load:
    """Clients that send requests repeatedly, and their failures."""

    def __init__(self) -> None:
        self.served = 0
        self.failures: list[str] = []

    def note(self, what: str, failure: str) -> None:
        if failure:
            self.failures.append(f"{what}: {failure}")
        else:
            self.served += 1

    async def http(self, name: str, url: str) -> None:
        async with httpx.AsyncClient() as client:
            while True:
                answer = await stream(client, url)
                self.note(name, "" if answer.endswith("data: [DONE]\n\n") else answer)

    async def grpc(self, target: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            while True:
                request = generation_pb2.GenerateRequest(text="x")
                try:
                    async for _ in stub.Generate(request, wait_for_ready=True, timeout=60):
                        pass
                except grpc.aio.AioRpcError as error:
                    self.note("gRPC", f"{error.code()} {error.details()}")
                else:
                    self.note("gRPC", "")


async def test_no_request_fails_when_one_of_two_routers_ends(scripted, tmp_path):
    """Twenty times under load: the other router serves requests that come while one drains.

    gRPC's core cancels calls that arrive between its shutdown and the client's notice of it. So
    connections must close before, at their maximum age: then calls on their way are served.
    """
    engine = await scripted("an answer", interval=0.01, max_num_seqs=64).start()
    port, http, rpc, *rest = free_ports(7)
    addresses = [tuple(rest[:2]), tuple(rest[2:])]

    def router(number: int) -> Server:
        own_rpc, own_http = addresses[number]
        flags = ["--engine", engine.address, "--http-port", str(own_http), "--drain-delay", "1.5"]
        flags += ["--max-connection-age", "0.5"]
        return Server("router", *flags, port=own_rpc, log=tmp_path / f"router-{number}.log")

    routers = [router(0), router(1)]
    loop, load = asyncio.get_running_loop(), Load()
    before = nginx(tmp_path, port, *(own_http for _, own_http in addresses))
    text = HAPROXY.format(
        http=http,
        grpc=rpc,
        http_servers="\n".join(f"    server r{h} 127.0.0.1:{h}" for _, h in addresses),
        grpc_servers="\n".join(f"    server r{g} 127.0.0.1:{g} port {h}" for g, h in addresses),
    )
    try:
        for one in routers:
            await asyncio.to_thread(one.wait_ready)
        with before, proxy(tmp_path, text, "haproxy", "-f"):
            await asyncio.sleep(1.5)
            works = [load.http("nginx", f"http://127.0.0.1:{port}") for _ in range(8)]
            works += [load.http("HAProxy", f"http://127.0.0.1:{http}") for _ in range(8)]
            works += [load.grpc(f"127.0.0.1:{rpc}") for _ in range(8)]
            tasks = [loop.create_task(work) for work in works]
            for turn in range(20):
                await asyncio.sleep(1)
                assert await asyncio.to_thread(routers[turn % 2].terminate) == 0
                routers[turn % 2] = router(turn % 2)
                await asyncio.to_thread(routers[turn % 2].wait_ready)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for one in routers:
            one.stop()
        await engine.kill()
    assert load.served > 1000
    assert Counter(load.failures) == Counter()
