"""Unusable tokenizers are refused with a reason and a remedy."""

import json
import shutil

import pytest

from octavo.common.models.errors import ModelError
from octavo.common.models.tokenizer_files import check_tokenizer_files
from octavo.router.text.tokenization import TokenizerError, Tokenizers

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture
async def tokenizers():
    loaded = Tokenizers()
    yield loaded
    loaded.close()


@pytest.fixture
def directory(tokenizer_dir, tmp_path):
    return shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "gemma2"])
async def test_a_model_without_a_tokenizer_is_refused(tokenizers, tmp_path, kind):
    """For some types, transformers creates a tokenizer that encodes any text to nothing."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ModelError, match=r"has no tokenizer: no tokenizer\.json, "):
        check_tokenizer_files(tmp_path)
    with pytest.raises(TokenizerError, match=r"has no tokenizer: .*--tokenizer"):
        await tokenizers.load(str(tmp_path))


async def test_a_tokenizer_of_special_tokens_only_is_refused(tokenizers, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "vocab.txt").write_text("")
    with pytest.raises(TokenizerError, match=r"special tokens only.*--tokenizer"):
        await tokenizers.load(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "chat_template.jinja"])
async def test_a_git_lfs_pointer_is_told_as_one(tokenizers, directory, name):
    (directory / name).write_text(POINTER)
    with pytest.raises(TokenizerError, match=f"{name} is a Git LFS pointer.*git lfs pull"):
        await tokenizers.load(str(directory))


@pytest.mark.parametrize("text", ["", '{"version": "1.0"'])
async def test_a_truncated_file_is_told(tokenizers, directory, text):
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not valid JSON .*--tokenizer"):
        await tokenizers.load(str(directory))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("text", ["", "[1]"])
async def test_a_damaged_file_beside_the_vocabulary_is_named(tokenizers, directory, name, text):
    (directory / name).write_text(text)
    with pytest.raises(TokenizerError, match=rf"{name} (is not valid|has no) JSON.*--tokenizer"):
        await tokenizers.load(str(directory))


async def test_a_file_of_something_else_is_told_with_its_size(tokenizers, directory):
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"Model missing.*tokenizer\.json \(2 bytes\)"):
        await tokenizers.load(str(directory))


async def test_code_of_its_own_is_neither_run_nor_asked_about(tokenizers, directory):
    config = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="needs Python code of its own"):
        await tokenizers.load(str(directory))


def test_half_a_vocabulary_is_refused(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ModelError, match=r"vocab\.json without merges\.txt"):
        check_tokenizer_files(tmp_path)
    (tmp_path / "merges.txt").write_text("")
    check_tokenizer_files(tmp_path)


def test_a_tokenizer_of_bytes_needs_no_vocabulary(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    check_tokenizer_files(tmp_path)
