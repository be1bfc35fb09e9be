from octavo.engine.events import Load
from octavo.engine.kv_cache import CacheStats
from octavo.engine.metrics import EngineMetrics


def test_the_share_of_blocks_in_use_counts_cached_blocks_as_unused():
    blocks = {"total_blocks": 8, "free_blocks": 1, "cached_blocks": 5, "shared_blocks": 0}
    swap = {"total_swap_blocks": 0, "used_swap_blocks": 0, "cached_swap_blocks": 0}
    stats = CacheStats(**blocks, **swap, wasted_slots=0)
    load = Load(1, 0, 0, stats, step_seconds=0.0, draining=False)
    metrics = EngineMetrics()
    metrics.show(lambda: load)
    assert metrics.registry.get_sample_value("octavo_engine_kv_cache_usage_ratio") == 2 / 8
