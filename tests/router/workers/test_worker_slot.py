"""Each worker's share of a router's limits, and limits that need a single worker."""

import pytest
from pydantic import ValidationError

from octavo.common.settings import SettingsError
from octavo.router.settings import RouterSettings
from octavo.router.tenants.tenant import read_tenants
from octavo.router.workers.worker_slot import settings_of_worker


def test_limits_of_the_router_are_divided_and_rounded_up(tmp_path):
    settings = RouterSettings(
        workers=4, port=0, max_queue_size=10, max_queue_tokens=0, max_connections=3, admin_port=9
    )
    own = settings_of_worker(settings, 5000, tmp_path)
    assert (own.max_queue_size, own.max_queue_tokens, own.max_connections) == (3, 0, 1)
    assert (own.port, own.metrics_port, own.admin_port) == (5000, 0, 0)
    assert own.response_store == tmp_path / "responses.sqlite"
    assert own.max_streams == settings.max_streams, "each connection has its own"


@pytest.mark.parametrize("limit", ["max_calls_per_peer", "max_connections_per_peer"])
def test_limits_of_an_address_need_one_worker(limit):
    RouterSettings(**{limit: 5})
    with pytest.raises(ValidationError, match=f"--{limit.replace('_', '-')} needs --workers 1"):
        RouterSettings(workers=2, **{limit: 5})


@pytest.mark.parametrize("limit", ["requests_per_second", "tokens_per_minute", "max_concurrency"])
def test_limits_of_a_tenant_need_one_worker(limit, tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(f"[bob]\n\n[alice]\n{limit} = 5\n")
    assert len(read_tenants(path)) == 2
    with pytest.raises(SettingsError, match=rf"\[alice\] {limit} needs --workers 1 \(given: 3\)"):
        read_tenants(path, workers=3)
