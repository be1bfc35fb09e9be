"""HTTP on a Unix socket, and under a path that a proxy keeps."""

import asyncio
import socket
import stat

import httpx
import pytest
from pydantic import ValidationError

from octavo.router.http import unix_socket
from octavo.router.settings import RouterSettings

PER_PEER = {"max_connections_per_peer": 1, "max_calls_per_peer": 1}


def connected(path):
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://octavo"
    )


async def test_a_unix_socket(scripted, serve, hello, tmp_path):
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))  # left behind, as by a killed server
    async with serve(scripted(), http_uds=path, **PER_PEER) as app:
        await app.up()
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        async with connected(path) as client:
            answers = await asyncio.gather(
                *(
                    client.post("/v1/chat/completions", json=hello | {"stream": s})
                    for s in (False, True)
                )
            )
            assert [answer.status_code for answer in answers] == [200, 200]
            assert answers[1].text.endswith("data: [DONE]\n\n")
            assert (await client.get("/health")).status_code == 200
        with pytest.raises(OSError, match=r"another server listens there.*give another --http-uds"):
            unix_socket.listen(path, 1)
    assert not path.exists()


def test_the_file_of_another_server_stays(tmp_path):
    path = tmp_path / "http.sock"
    with unix_socket.listen(path, 1):
        number = path.stat().st_ino
        path.rename(tmp_path / "moved")
        with unix_socket.listen(path, 0):
            unix_socket.remove(path, number)
            assert path.exists()
            for _ in range(2):  # also when its queue is full
                with pytest.raises(OSError, match="another server listens there"):
                    unix_socket.listen(path, 1)
            unix_socket.remove(path, path.stat().st_ino)
    assert not path.exists()


def test_what_else_is_there_is_left_alone(tmp_path):
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(OSError, match=f"cannot serve HTTP on {path} .something else is there"):
        unix_socket.listen(path, 1)
    assert path.read_text() == "mine"
    with pytest.raises(OSError, match="no such file or directory"):
        unix_socket.listen(tmp_path / "none" / "http.sock", 1)
    with pytest.raises(OSError, match="too long"):
        unix_socket.listen(tmp_path / ("x" * 200), 1)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"http_uds": "a", "http_port": 8000}, "--http-uds and --http-port exclude each other"),
        ({"http_uds": "a", "workers": 2}, "--http-uds needs --workers 1"),
        ({"uds": "a", "workers": 2}, "--uds needs --workers 1"),
        ({"uds": "a", "tls_cert": "b", "tls_key": "c"}, "--uds and --tls-cert exclude each other"),
        ({"http_root_path": "llm"}, "pattern"),
        ({"http_root_path": "/llm/"}, "pattern"),
        ({"http_root_path": "/.."}, "pattern"),
    ],
)
def test_settings_that_are_refused(settings, why):
    with pytest.raises(ValidationError, match=why):
        RouterSettings(**settings)


async def test_a_root_path(scripted, frontend, hello):
    async with (
        frontend(scripted(), http_root_path="/proxy/llm") as (app, _),
        httpx.AsyncClient(base_url=app.url) as client,
    ):
        for root in ("", "/proxy/llm"):
            answer = await client.post(f"{root}/v1/chat/completions", json=hello)
            assert answer.status_code == 200
            assert (await client.get(f"{root}/health")).status_code == 200
            assert (await client.get(f"{root}/v1/models")).json()["data"][0]["id"] == "tiny"
            page = await client.get(f"{root}/")
            assert 'src="playground/main.js"' in page.text  # relative to the page
            assert (await client.get(f"{root}/playground/main.js")).status_code == 200
        assert (await client.get("/proxy/v1/models")).status_code == 404
