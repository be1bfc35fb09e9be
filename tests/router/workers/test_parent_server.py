"""The services of the workers' parent, without workers."""

import asyncio

import grpc
import grpc.aio
import pytest

from benchmarks.metrics import Metrics
from octavo.common.ports import free_port
from octavo.router.settings import RouterSettings
from octavo.router.tenants.tenant import hash_key
from octavo.router.workers.parent_server import ParentServer
from octavo.v1 import admin_pb2, admin_pb2_grpc


@pytest.fixture
async def parent(tmp_path):
    """A parent with an admin and another tenant, whose keys are their names."""
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(
        f'[root]\nkeys = ["{hash_key("root")}"]\nadmin = true\n[bob]\nkeys = ["{hash_key("bob")}"]'
    )
    settings = RouterSettings(
        workers=2, tenants=tenants, admin_port=free_port(), metrics_port=free_port()
    )
    parent = ParentServer(settings, tmp_path / "parent.sock")
    await parent.start()
    parent.settings = settings
    yield parent
    await parent.stop()


async def test_admin_service_authenticates_its_callers(parent):
    found = {}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{parent.settings.admin_port}") as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        for key in ("", "bob", "root"):
            metadata = [("authorization", f"Bearer {key}")] if key else []
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ListEngines(admin_pb2.ListEnginesRequest(), metadata=metadata)
            found[key] = refused.value.code()
    assert found == {
        "": grpc.StatusCode.UNAUTHENTICATED,
        "bob": grpc.StatusCode.PERMISSION_DENIED,
        "root": grpc.StatusCode.UNAVAILABLE,  # there is no worker
    }


async def test_the_page_is_there_without_a_worker(parent):
    page = await asyncio.to_thread(Metrics, parent.settings.metrics_port)
    assert page.value("octavo_router_workers") == 0
    assert page.value("process_open_fds", worker="parent") > 0
    parent.serves()
    parent.restarts()
    page = await asyncio.to_thread(Metrics, parent.settings.metrics_port)
    assert page.value("octavo_router_workers") == 1
    assert page.value("octavo_router_worker_restarts_total") == 1
