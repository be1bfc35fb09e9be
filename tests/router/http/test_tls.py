"""The HTTP port uses the gRPC port's certificate."""

import asyncio
import urllib.error
import urllib.request

import pytest

HERE = ("ip:127.0.0.1",)


async def health(app, context, *identity) -> int:
    if identity:
        context.load_cert_chain(*identity)
    url = f"{app.url.replace('http:', 'https:')}/health"
    response = await asyncio.to_thread(urllib.request.urlopen, url, timeout=20, context=context)
    with response:
        return response.status


async def test_a_changed_certificate_holds_for_new_connections(
    frontend, scripted, authority, impostor
):
    cert, key = authority.issue("server", *HERE)
    fresh_cert, fresh_key = impostor.issue("server", *HERE)
    async with frontend(scripted("a"), tls_cert=cert, tls_key=key) as (app, _):
        assert app.router._settings.http_url.startswith("https://")
        assert await health(app, authority.client_context()) == 200
        with pytest.raises(urllib.error.URLError, match="certificate"):
            await health(app, impostor.client_context())
        cert.write_bytes(fresh_cert.read_bytes())
        assert await health(app, authority.client_context()) == 200  # the key does not match yet
        key.write_bytes(fresh_key.read_bytes())
        assert await health(app, impostor.client_context()) == 200


async def test_a_client_certificate_is_required_with_a_client_ca(
    frontend, scripted, authority, impostor
):
    cert, key = authority.issue("server", *HERE)
    settings = {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.ca}
    async with frontend(scripted("a"), **settings) as (app, _):
        assert await health(app, authority.client_context(), *authority.issue("client")) == 200
        for identity in ((), impostor.issue("client")):
            with pytest.raises(OSError):
                await health(app, authority.client_context(), *identity)


async def test_a_changed_client_authority_holds_too(frontend, scripted, authority, impostor):
    cert, key = authority.issue("server", *HERE)
    theirs, others = authority.issue("client"), impostor.issue("client")
    settings = {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.ca}
    async with frontend(scripted("a"), **settings) as (app, _):
        trusted = authority.client_context()
        assert await health(app, trusted, *theirs) == 200
        authority.ca.write_bytes(impostor.ca.read_bytes())
        assert await health(app, trusted, *others) == 200
        with pytest.raises(OSError):
            await health(app, trusted, *theirs)
