"""Connections to engines ignore the environment's proxy."""


async def test_engines_are_reached_without_the_proxy_of_the_environment(
    scripted, serve, monkeypatch
):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serve(scripted("a")) as app:
        await app.up(1)
