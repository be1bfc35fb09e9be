"""The metrics by vLLM's names, as an endpoint picker scrapes them."""

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.rpc.vllm.conftest import serving
from tests.engine.rpc.vllm.test_service import generate, idle, request


def scraped(engine):
    text = generate_latest(engine.metrics.exported).decode()
    families = text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples]


@pytest.mark.parametrize("names", ["octavo", "vllm", "both"])
async def test_metrics_by_vllms_names(byte_model, names):
    settings = {"metrics_names": names, "served_model_name": ["m"], "enable_lora": True}
    async with serving(byte_model, **settings) as engine:
        engine.start()
        for _ in range(2):
            await generate(engine, max_tokens=5, n=2)
        call = engine.stub.Generate(request(max_tokens=900, ignore_eos=True))
        async for _ in call:
            break
        samples = scraped(engine)
        call.cancel()
        await idle(engine)
    own = {sample.name for sample in samples if sample.name.startswith("octavo_engine_")}
    assert bool(own) is (names != "vllm")
    vllm = [sample for sample in samples if sample.name.startswith("vllm:")]
    assert bool(vllm) is (names != "octavo")
    if not vllm:
        return
    assert all(s.labels["model_name"] == "m" and s.labels["engine"] == "0" for s in vllm)
    values = {sample.name.removeprefix("vllm:"): sample.value for sample in vllm}
    expected = {
        "num_requests_running": 1,
        "num_requests_waiting": 0,
        "prompt_tokens_total": 120,
        "prefix_cache_queries_total": 120,
        "prefix_cache_hits_total": 64,
        "num_preemptions_total": 0,
        "time_to_first_token_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2,
        "request_time_per_output_token_seconds_count": 4,
        "request_queue_time_seconds_count": 3,
    }
    assert {name: values[name] for name in expected} == expected
    assert values["generation_tokens_total"] > 20
    assert 0 < values["kv_cache_usage_perc"] < 1
    labels = {s.name.removeprefix("vllm:"): s.labels for s in vllm}
    assert labels["cache_config_info"]["block_size"] == "16"
    assert labels["cache_config_info"]["num_gpu_blocks"] == "256"
    lora = labels["lora_requests_info"]
    assert (lora["max_lora"], lora["running_lora_adapters"]) == ("0", "")
    (ended,) = (s for s in vllm if s.name == "vllm:request_success_total")
    assert (ended.labels["finished_reason"], ended.value) == ("length", 4)
