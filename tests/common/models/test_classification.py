"""A checkpoint's own files say how it classifies."""

import json

import pytest

from octavo.common.models.checkpoint import check_config
from octavo.common.models.classification import ClassifierPlan, read_classifier
from octavo.common.models.errors import UnsupportedModelError

SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
NAMED = {"id2label": {"1": "good", "0": "bad"}}
ONE = {"id2label": {"0": "LABEL_0"}}


def write(path, config, architecture="BertForSequenceClassification"):
    named = {"architectures": [architecture], "model_type": "bert"} | config
    (path / "config.json").write_text(json.dumps(named))
    return path


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        ({}, (("LABEL_0", "LABEL_1"), "softmax")),
        ({"num_labels": 1}, (("LABEL_0",), "sigmoid")),
        (NAMED, (("bad", "good"), "softmax")),
        (NAMED | {"problem_type": "multi_label_classification"}, (("bad", "good"), "sigmoid")),
        (ONE | {"problem_type": "regression"}, (("LABEL_0",), "identity")),
        (ONE | {"sentence_transformers": {"activation_fn": IDENTITY}}, (("LABEL_0",), "identity")),
        (ONE | {"sbert_ce_default_activation_function": SIGMOID}, (("LABEL_0",), "sigmoid")),
    ],
)
def test_labels_and_activation(config, plan, tmp_path):
    assert read_classifier(write(tmp_path, config)) == ClassifierPlan(*plan)


def test_the_longest_text_is_the_tokenizers(tmp_path):
    write(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    assert read_classifier(tmp_path).max_tokens == 512
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    assert read_classifier(tmp_path).max_tokens is None


def test_other_activations_are_refused(tmp_path):
    write(tmp_path, {"sentence_transformers": {"activation_fn": "torch.nn.modules.Softplus"}})
    with pytest.raises(UnsupportedModelError, match="by softplus, and Octavo by one of sigmoid"):
        read_classifier(tmp_path)


def test_other_models_do_not_classify(tmp_path):
    assert read_classifier(write(tmp_path, {}, "BertModel")) is None
    check_config(write(tmp_path, {}))
