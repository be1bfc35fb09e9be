"""Adapters on a device with little memory, and leaks after loading and unloading."""

import gc
import weakref

import psutil
import pytest
import torch

from octavo.engine.lora.adapter import AdapterRegistry
from octavo.engine.lora.device_adapters import DeviceAdapters
from octavo.engine.lora.errors import AdapterError
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.engine.lora.test_outputs import own_tokens, prompt_of
from tests.engine.stepper import Stepper

MIB = 1 << 20


@pytest.fixture
def engine(decided_model, adapter_paths):
    lora = [f"{name}={path}" for name, path in adapter_paths.items()]
    settings = {"dtype": "float32", "compile": "off", "swap_space": 0.0, "num_blocks": 300}
    return Stepper(build(EngineSettings(model=str(decided_model), lora=lora, **settings)))


def test_adapters_take_turns_on_a_small_device(engine, adapter_paths):
    """With room for some adapters, the others wait, and the least recently used are evicted."""
    adapters = [engine.adapter(name) for name in adapter_paths]
    limit = max(adapter.nbytes for adapter in adapters) + min(a.nbytes for a in adapters)
    requests = [(prompt_of(i, 20), adapter) for i, adapter in enumerate(adapters * 2)]
    expected = [engine.submit(prompt, 6, adapter=adapter) for prompt, adapter in requests]
    engine.run()
    packed = engine.parts.adapters._targets.packed
    held = engine.parts.executor._adapters = DeviceAdapters(torch.device("cpu"), limit, packed)
    engine.scheduler.adapter_limit = limit
    again = [engine.submit(prompt, 6, adapter=adapter) for prompt, adapter in requests]
    most = []
    while engine.core.working:
        engine.step()
        most.append(held.nbytes)
    assert list(map(own_tokens, again)) == list(map(own_tokens, expected))
    assert limit / 2 < max(most) <= limit
    assert held.copies > len(adapters) // 2
    before = held.copies
    for _ in range(2):
        engine.submit(prompt_of(1, 20), 2, adapter=adapters[2])
        engine.run()
    assert held.copies <= before + 1  # it stays until others need room


def test_an_adapter_too_large_for_the_device_is_refused(engine, adapter_paths):
    targets = engine.parts.adapters._targets
    with pytest.raises(AdapterError, match="raise --adapter-memory"):
        AdapterRegistry(targets, ["base"], limit=1000).read("all", adapter_paths["all"])


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_loads_and_unloads_leak_nothing(engine, adapter_paths, count):
    registry, path = engine.parts.adapters, adapter_paths["one-layer"]
    process = psutil.Process()

    def load_and_unload():
        adapter = registry.read("again", path)
        registry.add(adapter)
        engine.submit(prompt_of(1, 9), 2, adapter=registry.find("again"))
        engine.run()
        engine.batches.clear()  # these hold requests, which hold their adapter
        engine.sampled.clear()
        registry.remove("again")
        return weakref.ref(adapter)

    held = engine.parts.executor._adapters
    before = held.nbytes
    seen = [load_and_unload() for _ in range(10)]
    gc.collect()
    resident = process.memory_info().rss
    seen += [load_and_unload() for _ in range(count)]
    gc.collect()
    assert sum(reference() is not None for reference in seen) <= 1  # the last step's batch
    assert held.nbytes <= before + 2 * MIB
    assert process.memory_info().rss < resident + 20 * MIB
    assert len(list(registry)) == len(adapter_paths)
