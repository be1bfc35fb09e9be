"""Caches belong to attention calls; a module may make several, or share another's cache."""

import pytest

from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.models.load_model import load
from tests.architectures.entries import entries
from tests.architectures.serve import save


def loaded_shape(name, directory):
    save(next(entry for entry in entries() if entry.name == name), directory)
    return load(str(directory), dtype="float32", device="cpu", block_size=16)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_shared_keys_and_values_are_kept_once(name, tmp_path):
    loaded = loaded_shape(name, tmp_path)
    config, shape = loaded.model.config, loaded.shape
    shared = config.num_hidden_layers - config.num_kv_shared_layers
    sources = [layer.source for layer in shape.layers]
    assert sources[:shared] == [None] * shared
    layout = plan_layout(shape, 16, loaded.dtype, loaded.dtype)
    for layer in range(shared, config.num_hidden_layers):
        kind = config.layer_types[layer]
        source = max(i for i in range(shared) if config.layer_types[i] == kind)
        assert sources[layer] == source
        assert layout.places[layer] == layout.places[source]
    assert len({(place.group, place.keys) for place in layout.places}) == shared


def test_each_call_of_a_module_has_its_own_place(tmp_path):
    loaded = loaded_shape("diffllama", tmp_path)
    calls = 2 * loaded.model.config.num_hidden_layers
    assert len(loaded.shape.layers) == calls
    layout = plan_layout(loaded.shape, 16, loaded.dtype, loaded.dtype)
    assert len({(place.group, place.keys) for place in layout.places}) == calls
