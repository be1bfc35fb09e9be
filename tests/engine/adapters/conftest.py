"""A tiny base model, adapters that peft saved for it, and what peft computes with them."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

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


def save_adapter(base, path, *, seed=0, std=0.15, **config):
    """Save an adapter for a base model with random weights of both of its matrices."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(**{"lora_alpha": 16} | config))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=std)
    adapted.save_pretrained(path, save_embedding_layers=False)
    return path


def merged(base, path):
    """Return the base model in float32 with an adapter merged into its weights, by peft."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, path).merge_and_unload().eval()


@pytest.fixture(scope="session")
def adapter_paths(decided_model, tmp_path_factory):
    """The adapters of `CONFIGS`, by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(decided_model, folder / name, seed=seed, **config)
        for seed, (name, config) in enumerate(CONFIGS.items())
    }
