"""`octavo check`: the real command, for configs without weights."""

import json

import pytest
import typer
from typer.testing import CliRunner

from octavo.cli import app
from octavo.cli.check import parse_bytes
from octavo.common import logging
from octavo.common.ports import free_port

GIB = 1 << 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Run the command for a directory with only a config; return its result."""
    monkeypatch.setattr(logging, "configure", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, **config: object):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
        given = ["check", str(tmp_path), "--device", "cpu", *arguments]
        return CliRunner().invoke(app, given)

    return run


def test_it_says_how_a_model_would_be_served(check):
    result = check("--dtype", "bfloat16", "--memory", "8GiB")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert text.startswith("served: ")
    assert "LlamaForCausalLM" in text
    assert "8 K and V of all tokens 8.0 KiB 32.0 MiB" in text


def test_its_json_has_all_of_it(check):
    result = check("--json", "--dtype", "bfloat16", "--memory", "8GiB", "--cache-memory", "1")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["served"] is True
    assert (found["model_type"], found["dtype"], found["device"]) == ("llama", "bfloat16", "cpu")
    assert found["cache"] == GIB
    assert found["tokens"] == GIB // (8 * 2 * 4 * 64 * 2)
    assert found["sequences"] == found["tokens"] // 4096
    assert found["weights"] >= 2 * found["parameters"]
    sizes = found["weights_by_quantization"]
    assert sizes["none"] > sizes["int8"] > sizes["int4"]
    assert [group["kind"] for group in found["groups"]] == ["attention"]


def test_windows_bound_what_a_sequence_takes(check):
    layers = ["sliding_attention", "full_attention"] * 4
    window = {"model_type": "qwen3", "layer_types": layers, "use_sliding_window": True}
    result = check("--json", "--memory", "8GiB", **window, sliding_window=128)
    full, *_, bounded = json.loads(result.stdout)["groups"]
    assert (full["kind"], full["reach"]) == ("attention", None)
    assert (bounded["kind"], bounded["reach"]) == ("window", 128)
    assert bounded["sequence_bytes"] < full["sequence_bytes"] / 2


def test_a_refusal_is_that_of_a_start(check, tmp_path):
    result = check(model_type="no_such")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {tmp_path} has the model type 'no_such'")
    result = check("--json", model_type="no_such")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["served"] is False
    assert "'no_such', which transformers" in found["reason"]


def test_weights_that_do_not_fit_are_told(check):
    result = check("--memory", "100MiB")
    assert result.exit_code == 1
    assert "the weights take about" in result.stderr


def test_without_a_network_one_message_says_what_to_do(check, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    result = CliRunner().invoke(app, ["check", "owner/none-such"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: 'owner/none-such' is not a local directory")
    assert "cannot be reached" in result.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", 16 * GIB), ("16", 16 * GIB), ("1.5 g", 3 * GIB // 2), ("2GB", 2 * 10**9)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "1 PB", "1..2GiB", "-1"])
def test_what_is_no_size(text):
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_bytes(text)


BERT = {"model_type": "bert", "num_hidden_layers": 2, "max_position_embeddings": 512}


def test_it_says_what_a_model_makes_of_texts(check):
    made = check("--pooling", "mean", "--json", architectures=["BertModel"], **BERT)
    found = json.loads(made.stdout)
    assert (found["dimensions"], found["labels"], found["max_model_len"]) == (1024, [], 512)
    assert found["loading"] == 2 * found["parameters"]
    names = {"id2label": {"0": "bad", "1": "good"}, "problem_type": "single_label_classification"}
    made = check(architectures=["BertForSequenceClassification"], **BERT, **names)
    assert made.exit_code == 0, made.output
    assert "makes scores of bad, good" in " ".join(made.stdout.split())
