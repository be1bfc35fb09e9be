"""Models with large models' layers, often fewer of them, and random weights.

A layer's cost does not depend on its weights' values, and routers with random weights use all
experts equally. The vocabulary is the demo model's, so no other tokenizer is needed.
"""

import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from octavo.engine.models.resolve_or_convert import resolve

CONTEXT = 2048
RECIPE = "recipe.json"
"""File with the settings of a complete directory; written last."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model.

    Attributes:
        title: Name in the report.
        model_type: Model type of transformers' config.
        settings: Other settings of the config, without vocabulary and context.
    """

    title: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)


def _qwen3(size: str, hidden_size: int) -> Shape:
    return Shape(
        f"Qwen3-{size}",
        "qwen3",
        {
            "hidden_size": hidden_size,
            "intermediate_size": 3 * hidden_size,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    )


SHAPES = {
    "qwen3-0.6b": _qwen3("0.6B", 1024),
    "qwen3-1.7b": _qwen3("1.7B", 2048),
    "qwen3-moe": Shape(
        "2 of the 48 layers of Qwen3-30B-A3B",
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_hidden_layers": 2,
        },
    ),
    "falcon-h1": Shape(
        "8 of the 24 layers of Falcon-H1-1.5B",
        "falcon_h1",
        {
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 256,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 256,
            "num_hidden_layers": 8,
        },
    ),
    "granite-4-h": Shape(
        "10 of the 40 layers of Granite-4.0-H-Tiny",
        "granitemoehybrid",
        {
            "hidden_size": 1536,
            "intermediate_size": 512,
            "shared_intermediate_size": 1024,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "position_embedding_type": "nope",
            "layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 4],
            "num_hidden_layers": 10,
        },
    ),
}


def provide(name: str, folder: Path) -> Path:
    """Return the directory of a shape's model; create the model if it is missing.

    Args:
        name: Key of `SHAPES`.
        folder: Folder of all models.

    Raises:
        ModelError: The demo model's package could not be fetched.
    """
    target = folder / "models" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    recipe = json.dumps([SHAPES[name].model_type, SHAPES[name].settings, CONTEXT])
    with FileLock(target.parent / f".{name}.lock"):
        done = target / RECIPE
        if done.exists() and done.read_text() == recipe:
            return target
        if target.exists():
            shutil.rmtree(target)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".preparing-") as work:
            made = Path(work) / name
            save(SHAPES[name], made)
            (made / RECIPE).write_text(recipe)
            made.rename(target)
    return target


def save(shape: Shape, directory: Path) -> None:
    """Save a model with these sizes, random bfloat16 weights and the demo model's tokenizer."""
    import torch  # noqa: PLC0415 - slow, and most runs create no model
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - slow, too

    demo = Path(resolve("demo"))
    vocabulary = json.loads((demo / "config.json").read_text())
    settings = {
        key: vocabulary[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")
    } | shape.settings
    config = AutoConfig.for_model(
        shape.model_type, **settings, max_position_embeddings=CONTEXT, dtype=torch.bfloat16
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    for file in demo.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, directory)
