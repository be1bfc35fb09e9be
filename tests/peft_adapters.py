"""Adapters saved by peft or in its format, and peft's results with them."""

import json

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def save_adapter(base, path, *, seed=0, std=0.15, **config):
    """Save an adapter for a base model, with random weights in both matrices."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(**{"lora_alpha": 16} | config))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=std)
    adapted.save_pretrained(path, save_embedding_layers=False)
    return path


def write_adapter(path, layers, *, rank, seed=0, std=0.15):
    """Write an adapter of any layers, which peft may not adapt, with random weights.

    Args:
        path: The adapter's directory.
        layers: The numbers of inputs and outputs of each layer, by name.
        rank: The rank.
        seed: The seed of the weights.
        std: Their standard deviation.
    """
    path.mkdir(parents=True)
    numbers = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (inputs, outputs) in layers.items():
        for part, shape in {"A": (rank, inputs), "B": (outputs, rank)}.items():
            weight = std * torch.randn(shape, generator=numbers)
            weights[f"base_model.model.{name}.lora_{part}.weight"] = weight
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": sorted(layers)}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def merged(base, path):
    """Return the base model in float32 with an adapter merged into its weights, by peft."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, path).merge_and_unload().eval()


def greedy(model, prompt, count):
    """Return the tokens that transformers generates."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
