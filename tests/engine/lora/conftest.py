"""Adapters of a tiny base model."""

import pytest

from tests.peft_adapters import save_adapter

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
CONFIGS = {
    "attention": {"r": 4, "target_modules": ATTENTION},
    "all": {"r": 16, "lora_alpha": 8, "target_modules": "all-linear"},
    "values": {"r": 1, "target_modules": ["v_proj"]},
    "mlp": {"r": 33, "use_rslora": True, "target_modules": MLP},
    "head": {"r": 8, "target_modules": ["lm_head", "q_proj"]},
    "one-layer": {"r": 256, "target_modules": ["up_proj"], "layers_to_transform": [1]},
    "patterns": {
        "r": 8,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 3, r"layers\.\d+\.mlp.down_proj": 12},
        "alpha_pattern": {"down_proj": 40},
    },
    "expression": {"r": 12, "target_modules": r".*\.0\..*(k_proj|gate_proj)"},
}
"""Adapters of different ranks and target modules."""


@pytest.fixture(scope="session")
def adapter_paths(decided_model, tmp_path_factory):
    """The adapters of `CONFIGS`, by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(decided_model, folder / name, seed=seed, **config)
        for seed, (name, config) in enumerate(CONFIGS.items())
    }
