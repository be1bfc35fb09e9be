"""Small random models, and processes that run them as ranks."""

import json
import os
import uuid

import numpy as np
import torch
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

from benchmarks.fixture import save_tokenizer
from octavo.engine.parallel.meeting import STORE
from octavo.engine.parallel.place import RankPlace
from tests import preloaded
from tests.architectures.entries import OVERRIDES
from tests.architectures.tiny import make_model, tiny_config
from tests.engine.parallel.workload import VOCABULARY
from tests.engine.random_model import save_random_model

COMMON = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
MODELS = {
    "llama": LlamaConfig(**COMMON),
    "few key and value heads": LlamaConfig(**COMMON | {"num_key_value_heads": 1}),
    "qwen3": Qwen3Config(**COMMON | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "gemma3": Gemma3TextConfig(
        **COMMON | {"num_key_value_heads": 2, "sliding_window": 24, "sliding_window_pattern": 2}
    ),
    "wide": LlamaConfig(**COMMON | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}),
    "gpt2": GPT2Config(vocab_size=500, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "mixtral": MixtralConfig(
        **COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    ),
}

KINDS = {
    "two stages": (2, 2, False),
    "two stages of two": (4, 2, False),
    "two ranks": (2, 1, False),
    "whole experts on two": (2, 1, True),
    "four stages": (4, 4, False),
    "whole experts on four": (4, 1, True),
}
"""Numbers of ranks and of stages, and whether ranks have whole experts, by name."""
TYPES = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "falcon_h1", "gemma3_text", "qwen3_next")
"""Types with experts, latents, sinks, states and windows."""
CLEAR = {"deepseek_v3": {"num_experts_per_tok": 8}}
"""Settings of a type: rounding decided between two experts of a token, so each gets all of them."""
WITH_EXPERTS = {"qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"}
WITH_STATES = {"falcon_h1", "qwen3_next"}
WITH_WINDOWS = {"gpt_oss", "gemma3_text"}


def save_models(names, folder):
    """Save tiny random models with clear choices; return their paths."""
    paths = []
    for name in names:
        path = folder / name.replace(" ", "_")
        save_random_model(MODELS[name], path, std=0.15, dtype=torch.float32)
        paths.append(str(path))
    return paths


def save_tiny(names, folder):
    """Save tiny models of some types, with a tokenizer of bytes; return their paths."""
    for name in names:
        own = OVERRIDES.get(name, {}) | CLEAR.get(name, {})
        config = tiny_config(name, own | {"vocab_size": VOCABULARY})
        make_model(config).save_pretrained(folder / name)
        save_tokenizer(folder / name)
    return [str(folder / name) for name in names]


def type_of(path):
    """Return the type of a model that `save_tiny` saved."""
    return path.rpartition("/")[2]


def few_blocks(path, count):
    """Return `count` blocks, or twice as many if a model has several groups of layers."""
    return count * (2 if type_of(path) in WITH_STATES | WITH_WINDOWS else 1)


def has_experts(case):
    """Return whether the model of a case, from `save_tiny`, has experts."""
    return type_of(case["model"]) in WITH_EXPERTS


def run_kind(kind, cases, folder, has_experts=has_experts):
    """Run the workload on the ranks of a kind; see `KINDS` and `run_ranks`."""
    size, stages, whole = KINDS[kind]
    given = {}
    for name, case in cases.items():
        own = case["settings"] | {"expert_parallel": whole and has_experts(case)}
        given[name] = case | {"stages": stages, "settings": own}
    return run_ranks(size, given, folder)


def run_ranks(size, cases, folder):
    """Run the workload on `size` ranks; return what rank 0 printed.

    Args:
        size: Number of ranks.
        cases: Cases by name; see `workload.py`.
        folder: Folder in which the ranks find each other.
    """
    codes, printed = start_ranks(size, cases, folder)
    assert codes == [0] * size, printed
    return printed[0]


def start_ranks(size, cases, folder):
    """Run the workload as `run_ranks` does; return the exit codes and what each rank printed."""
    places = [RankPlace(rank, size, rank, size) for rank in range(size)]
    run = uuid.uuid4()
    own = {"OMP_NUM_THREADS": "1", STORE: str(folder / f"store-{run}")}
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}}
    outputs = [folder / f"{run}-{place.rank}" for place in places]
    processes = [
        preloaded.Process(
            "tests.engine.parallel.workload",
            [str(size), json.dumps(cases)],
            output,
            errors=False,
            environment=environment | own | (place.variables() if size > 1 else {}),
        )
        for place, output in zip(places, outputs, strict=True)
    ]
    try:
        codes = [process.wait(600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    lines = [output.read_text().splitlines() for output in outputs]
    return codes, [json.loads(own[-1]) if own else None for own in lines]


def score_errors(found, expected):
    """Return the differences of the log-probabilities of prompts' own tokens."""
    pairs = zip(found["scores"], expected["scores"], strict=True)
    return np.concatenate([np.subtract(own, other) for own, other in pairs])
