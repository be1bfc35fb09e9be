"""Models without a text-generating class in transformers are refused by their type."""

import json

import pytest

from octavo.common.models.errors import UnsupportedModelError
from octavo.engine.models.checks.model_class import check_model_class

OWN = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnLM"}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "blip-2"}, r"is a multimodal model \(blip-2\)"),
        ({"model_type": "paligemma"}, "is a multimodal model"),
        ({"model_type": "t5"}, "is an encoder-decoder model"),
        ({"model_type": "bart"}, "is an encoder-decoder model"),
        ({"model_type": "whisper"}, "is an encoder-decoder model"),
        ({"model_type": "modernbert"}, "is an encoder"),
        ({"model_type": "vit"}, "is no language model"),
        ({"model_type": "own"}, "model type 'own', which transformers .* does not know"),
        ({"model_type": "own", "auto_map": OWN}, r"code of its own \(OwnLM in modeling_own\.py\)"),
        (
            {"auto_map": {"AutoConfig": "owner/name--configuration_own.OwnConfig"}},
            r"code of its own \(OwnConfig in configuration_own\.py\)",
        ),
        ({"model_type": "llama", "auto_map": OWN}, r"code of its own .*LlamaForCausalLM"),
    ],
)
def test_a_model_without_a_class_is_refused(config, why, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=why) as caught:
        check_model_class(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "gemma3"},  # its text part is served
        {"model_type": "falcon", "auto_map": {"AutoModelForCausalLM": "m.FalconForCausalLM"}},
        {"model_type": "mpt", "auto_map": {"AutoModelForCausalLM": "m.MPTForCausalLM"}},
        {"model_type": "llama", "auto_map": {"AutoTokenizer": ["tokenization.Own", None]}},
        {"model_type": "bart", "is_encoder_decoder": False},
    ],
)
def test_a_model_with_a_class_is_left_to_the_next_checks(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_model_class(str(tmp_path))
