"""Quantizes a model's checkpoint."""

import json
from itertools import starmap

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def quantize(path, settings, pack):
    """Quantize a saved model's projections, and update its config.

    Args:
        path: The model's directory.
        settings: The `quantization_config`.
        pack: One of `packers`.

    Returns:
        All weights by name; quantized ones are dequantized.
    """
    weights = load_file(path / "model.safetensors")
    tensors, exact = {}, {}
    experts_alone = settings["quant_method"] == "mxfp4"
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in PROJECTIONS and layer != name and not experts_alone:
            parts, exact[name] = pack(weight.float())
            tensors |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
        elif name.endswith(("gate_up_proj", "down_proj")):  # gpt-oss: `[experts, inputs, outputs]`
            parts, values = pack(weight.float().transpose(1, 2))
            exact[name] = values.transpose(1, 2).contiguous()
            tensors |= {f"{name}_{part}": value.contiguous() for part, value in parts.items()}
        else:
            tensors[name] = exact[name] = weight
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    change_json(path / "config.json", quantization_config=settings)
    return exact


PROJECTIONS = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("w1", "w2", "w3"),
}


def change_json(file, **members):
    file.write_text(json.dumps(json.loads(file.read_text()) | members))


def change_tensors(path, change):
    """Replace a model's tensors by a function's results for each name and tensor."""
    file = path / "model.safetensors"
    kept = starmap(change, load_file(file).items())
    tensors = {name: value for name, value in kept if value is not None}
    save_file(tensors, file, metadata={"format": "pt"})


def reference_logits(config, exact, tokens, dtype, scratch):
    """Return the logits of transformers' own model with these weights, read from a file."""
    scratch.mkdir()
    config.save_pretrained(scratch)
    save_file(
        {name: value.contiguous() for name, value in exact.items()},
        scratch / "model.safetensors",
        metadata={"format": "pt"},
    )
    model = AutoModelForCausalLM.from_pretrained(scratch, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        return model(input_ids=tokens[None], use_cache=False).logits[0].float()
