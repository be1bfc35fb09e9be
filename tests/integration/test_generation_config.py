"""A real server samples by its model's generation_config.json, unless a flag disables it."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig

import octavo
from octavo.common.ports import free_port
from tests.engine.random_model import save_random_model

OWN = {"temperature": 0.5, "top_k": 30, "repetition_penalty": 1.25, "max_new_tokens": 12}
EXPLICIT = {"temperature": 0.5, "top_k": 30, "repetition_penalty": 1.25, "max_tokens": 12}
NEUTRAL = {"temperature": 1, "top_k": 0, "repetition_penalty": 1, "max_tokens": 12}
SMALL = ("--num-blocks", "64", "--swap-space", "0", "--compile", "off", "--device", "cpu")
PROMPT = "The three largest cities of Italy are"


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory) -> Path:
    """A tiny random model with the demo's tokenizer and its own defaults."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=256, eos_token_id=2,
    )  # fmt: skip
    save_random_model(config, path, std=0.1)
    for file in (*demo_model.glob("*token*"), *demo_model.glob("chat_template*")):
        shutil.copy(file, path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **OWN}))
    return path


@pytest.fixture(scope="module")
def servers(model, launch_shared):
    """Two servers of the model: with its defaults, and without; both start at once."""
    started = []
    for flags in ((), ("--generation-config", "none")):
        port = free_port()
        arguments = ("--model", str(model), *SMALL, "--http-port", str(port), *flags)
        started.append(launch_shared("serve", *arguments))
        started[-1].http = f"http://127.0.0.1:{port}"
    return [server.wait_ready() for server in started]


def generate(server, **options) -> list[tuple[int, ...]]:
    with octavo.Client(server.address) as client:
        stream = client.generate(PROMPT, seed=7, n=2, token_ids=True, ignore_eos=True, **options)
        return [output.token_ids for output in stream.complete().outputs]


def test_defaults_are_as_if_the_client_had_sent_them(servers):
    own, plain = servers
    assert generate(own) == generate(own, **EXPLICIT) == generate(plain, **EXPLICIT)


def test_neutral_values_of_the_client_win(servers):
    own, plain = servers
    assert generate(own, **NEUTRAL) == generate(plain, max_tokens=12)
    assert generate(own, **NEUTRAL) != generate(own)


def test_models_tell_them(servers):
    with octavo.Client(servers[0].address) as client:
        (model,) = client.list_models()
    assert model.default_sampling == {key: OWN[key] for key in OWN if key != "max_new_tokens"}
    assert model.default_max_tokens == 12
    with octavo.Client(servers[1].address) as client:
        (model,) = client.list_models()
    assert (model.default_sampling, model.default_max_tokens) == ({}, None)
