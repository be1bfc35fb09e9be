from octavo.engine.metrics import EngineMetrics
from octavo.v1.engine_pb2 import Load


def test_the_share_of_blocks_in_use_counts_cached_blocks_as_unused():
    load = Load(running=1, waiting=0, total_blocks=8, free_blocks=1, cached_blocks=5)
    metrics = EngineMetrics()
    metrics.show(lambda: load)
    assert metrics.registry.get_sample_value("octavo_engine_kv_cache_usage_ratio") == 2 / 8
