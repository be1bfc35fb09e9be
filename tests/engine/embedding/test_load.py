"""Tiny random models of each family embed as transformers computes; others are refused."""

import json
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    CamembertConfig,
    DistilBertConfig,
    Gemma3TextConfig,
    ModernBertConfig,
    MPNetConfig,
    NomicBertConfig,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from octavo.common.models.classification import ClassifierPlan, read_classifier
from octavo.common.models.embedding import EmbeddingPlan
from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.engine.embedding.load import load_encoder
from octavo.engine.settings import EngineSettings

BASE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 200,
    "pad_token_id": 1,
}
CONFIGS = {
    "bert": BertConfig(**BASE),
    "roberta": RobertaConfig(**BASE),
    "xlm-roberta": XLMRobertaConfig(**BASE),
    "camembert": CamembertConfig(**BASE),
    "distilbert": DistilBertConfig(
        vocab_size=300, dim=64, hidden_dim=96, n_layers=3, n_heads=4, max_position_embeddings=200
    ),
    "modernbert": ModernBertConfig(
        **BASE, local_attention=16, bos_token_id=0, eos_token_id=2, cls_token_id=0, sep_token_id=2
    ),
    "nomic_bert": NomicBertConfig(**BASE),
    "qwen3": Qwen3Config(**BASE, num_key_value_heads=2, head_dim=16),
    "gemma3, in both directions": Gemma3TextConfig(
        **BASE,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=16,
        use_bidirectional_attention=True,
    ),
}
POOLINGS = {"qwen3": "last", "modernbert": "cls", "distilbert": "max"}


def save(config, path, std=0.15, kind=AutoModel):
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, weight in model.named_parameters():
        if "norm" not in name.lower():
            torch.nn.init.normal_(weight, std=std)
    model.save_pretrained(path)
    return model.eval()


def load(path, pooling="mean", **settings):
    settings = EngineSettings(model=str(path), **settings)
    return load_encoder(settings, path, EmbeddingPlan(pooling, normalize=True)).encoder


def random_texts(*lengths):
    generator = np.random.default_rng(5)
    return [generator.integers(3, 300, length).astype(np.uint32) for length in lengths]


@torch.inference_mode()
def by_transformers(model, text, pooling):
    ids = torch.from_numpy(text.astype(np.int64))[None]
    hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    pooled = {
        "mean": hidden.mean(0),
        "cls": hidden[0],
        "last": hidden[-1],
        "max": hidden.amax(0),
    }[pooling]
    return normalize(pooled, dim=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_family_embeds_as_transformers_does(name, tmp_path):
    pooling = POOLINGS.get(name, "mean")
    model = save(CONFIGS[name], tmp_path)
    encoder = load(tmp_path, pooling)
    texts = random_texts(7, 1, 90, 33)
    computed = encoder.finish(encoder.embed(texts), None, raw=False)
    expected = torch.stack([by_transformers(model, text, pooling) for text in texts])
    torch.testing.assert_close(computed, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_family_scores_pairs_as_transformers_does(name, tmp_path):
    config = deepcopy(CONFIGS[name])
    config.id2label = {0: "no", 1: "perhaps", 2: "yes"}
    if name == "modernbert":
        config.classifier_pooling = "mean"
    model = save(config, tmp_path, kind=AutoModelForSequenceClassification)
    plan = read_classifier(tmp_path)
    assert plan == ClassifierPlan(("no", "perhaps", "yes"), "softmax")
    encoder = load_encoder(EngineSettings(model=str(tmp_path)), tmp_path, plan).encoder
    texts = random_texts(7, 1, 90, 33)
    given = [{"input_ids": torch.from_numpy(text.astype(np.int64))[None]} for text in texts]
    if encoder.segments is not None:
        assert config.type_vocab_size == 2
        for text, inputs in zip(texts, given, strict=True):
            inputs["token_type_ids"] = torch.ones_like(inputs["input_ids"])
            inputs["token_type_ids"][:, : len(text) // 3] = 0
            text[len(text) // 3 :] += encoder.segments
    with torch.inference_mode():
        expected = torch.cat([model(**inputs).logits for inputs in given])
    logits = encoder.embed(texts)
    torch.testing.assert_close(encoder.finish(logits, None, raw=True), expected, atol=1e-5, rtol=0)
    scores = encoder.finish(logits, None, raw=False)
    torch.testing.assert_close(scores, expected.softmax(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("answers", [(7, 9), (7,)])
def test_a_language_models_answers_are_scores(answers, tmp_path):
    model = save(CONFIGS["qwen3"], tmp_path, kind=AutoModelForCausalLM)
    plan = ClassifierPlan(("LABEL_0",), "sigmoid", answers=answers)
    encoder = load_encoder(EngineSettings(model=str(tmp_path)), tmp_path, plan).encoder
    texts = random_texts(7, 1, 33)
    with torch.inference_mode():
        ids = [torch.from_numpy(text.astype(np.int64))[None] for text in texts]
        logits = torch.cat([model(input_ids=each).logits[:, -1] for each in ids])
    expected = logits[:, 7] - (logits[:, 9] if len(answers) > 1 else 0)
    torch.testing.assert_close(encoder.embed(texts)[:, 0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_fewer_bits_change_little(settings, tmp_path):
    model = save(CONFIGS["bert"], tmp_path, std=0.05)
    encoder = load(tmp_path, **settings)
    texts = random_texts(7, 60, 33)
    computed = encoder.finish(encoder.embed(texts), None, raw=False)
    expected = torch.stack([by_transformers(model, text, "mean") for text in texts])
    assert (computed * expected).sum(1).min() > 0.999


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification])
def test_a_checkpoint_in_16_bits_takes_no_more_memory_while_it_loads(kind, tmp_path, monkeypatch):
    model = save(CONFIGS["bert"], tmp_path, std=0.05, kind=kind).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    size = sum(weight.nbytes for weight in model.parameters())
    memory = SimpleNamespace(available=int(1.5 * size))
    monkeypatch.setattr("octavo.engine.embedding.load.memory_of", lambda _: memory)
    plan = EmbeddingPlan("mean", normalize=True)
    if kind is AutoModelForSequenceClassification:
        plan = ClassifierPlan(("a", "b"), "softmax")
    in_float32 = EngineSettings(model=str(tmp_path), dtype="float32")
    encoder = load_encoder(EngineSettings(model=str(tmp_path)), tmp_path, plan).encoder
    with pytest.raises(ModelError, match="GiB of memory while it loads"):
        load_encoder(in_float32, tmp_path, plan)
    memory.available *= 2
    wide = load_encoder(in_float32, tmp_path, plan).encoder
    model.float()
    for text in random_texts(7, 60):
        ids = torch.from_numpy(text.astype(np.int64))[None]
        with torch.inference_mode():
            out = model(ids)
        exact = out.last_hidden_state.mean(1) if kind is AutoModel else out.logits
        torch.testing.assert_close(wide.embed([text]), exact, atol=1e-5, rtol=0)
        torch.testing.assert_close(encoder.embed([text]), exact, atol=0.05, rtol=0.05)


def test_the_first_quarter_of_the_layers_is_not_quantized(tmp_path):
    save(CONFIGS["bert"], tmp_path, std=0.05)
    encoder = load(tmp_path, quantization="int8", compile="off")
    bytes_in = [
        sum(buffer.dtype == torch.int8 for buffer in layer.buffers())
        for layer in encoder.forward.model.encoder.layer
    ]
    assert bytes_in[0] == 0
    assert bytes_in[1] == bytes_in[2] > 0


def test_dense_layers_follow_the_pooling(tmp_path):
    model = save(CONFIGS["bert"], tmp_path)
    layer = torch.nn.Linear(64, 24)
    (tmp_path / "2_Dense").mkdir()
    weights = {f"linear.{name}": weight.detach() for name, weight in layer.named_parameters()}
    save_file(weights, tmp_path / "2_Dense/model.safetensors")
    config = {"in_features": 64, "out_features": 24, "bias": True}
    config["activation_function"] = "torch.nn.modules.activation.Tanh"
    (tmp_path / "2_Dense/config.json").write_text(json.dumps(config))
    plan = EmbeddingPlan("mean", normalize=False, dense=(tmp_path / "2_Dense",))
    encoder = load_encoder(EngineSettings(model=str(tmp_path)), tmp_path, plan).encoder
    assert encoder.dimensions == 24
    (text,) = random_texts(9)
    with torch.inference_mode():
        ids = torch.from_numpy(text.astype(np.int64))[None]
        expected = torch.tanh(layer(model(input_ids=ids).last_hidden_state[0].mean(0)))
    torch.testing.assert_close(encoder.embed([text])[0], expected, atol=1e-5, rtol=0)
    config["activation_function"] = "torch.nn.modules.activation.Softplus"
    (tmp_path / "2_Dense/config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"has the activation .*Softplus"):
        load_encoder(EngineSettings(model=str(tmp_path)), tmp_path, plan)


def test_positions_behind_padding_are_not_counted_as_tokens(tmp_path):
    save(CONFIGS["roberta"], tmp_path)
    assert load(tmp_path).max_tokens == 198
    assert load(tmp_path, max_model_len=50).max_tokens == 50
    with pytest.raises(UnsupportedModelError, match="--max-model-len is 199, and its texts have"):
        load(tmp_path, max_model_len=199)


def test_leading_dimensions_are_normalized_again(tmp_path):
    save(CONFIGS["bert"], tmp_path)
    encoder = load(tmp_path)
    embeddings = encoder.embed(random_texts(20, 9))
    expected = normalize(embeddings[:, :16], dim=1)
    torch.testing.assert_close(encoder.finish(embeddings, 16, raw=False), expected)


def test_a_model_whose_attention_octavo_does_not_compute_is_refused(tmp_path):
    save(MPNetConfig(**BASE), tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"does not call .* attention interface"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"speculation": "ngram"}, "--speculation"),
    ],
    ids=str,
)
def test_settings_that_do_not_apply_are_refused(settings, flag, tmp_path):
    save(CONFIGS["bert"], tmp_path)
    with pytest.raises(UnsupportedModelError, match=flag):
        load(tmp_path, **settings)
