"""An engine whose tokenizer the router cannot load is reported once, in the log and status."""

import json
import shutil

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from octavo.common.ports import free_port
from octavo.router.engines import link
from octavo.v1 import admin_pb2, admin_pb2_grpc, generation_pb2


async def test_it_is_told_once_and_used_when_it_is_mended(
    scripted, serve, tokenizer_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(link, "UNUSABLE_SECONDS", 0.05)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    port = free_port()
    with capture_logs() as logs:
        async with (
            serve(scripted(tokenizer=str(tmp_path)), admin_port=port) as s,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            admin = admin_pb2_grpc.AdminServiceStub(channel)

            def told():
                return [e for e in logs if e["event"] == "engine cannot be used"]

            await s.until(lambda: len(told()) > 3)
            with pytest.raises(grpc.aio.AioRpcError, match="1 reached but unusable") as caught:
                await s.stub.Generate(generation_pb2.GenerateRequest(text="a")).read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            (status,) = (await admin.ListEngines(admin_pb2.ListEnginesRequest())).engines
            assert status.state == admin_pb2.ENGINE_STATE_CONNECTING
            shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
            await s.up()
            (mended,) = (await admin.ListEngines(admin_pb2.ListEnginesRequest())).engines
    assert [entry["log_level"] for entry in told()][:3] == ["error", "debug", "debug"]
    for words in (str(tmp_path), "has no tokenizer: no tokenizer.json", "the router's --tokenizer"):
        assert words in told()[0]["reason"]
        assert words in status.problem
    assert not mended.problem


async def test_its_routers_may_name_another_tokenizer(scripted, serve, tokenizer_dir, tmp_path):
    async with serve(scripted(tokenizer=str(tmp_path)), tokenizer=tokenizer_dir) as s:
        await s.up()
