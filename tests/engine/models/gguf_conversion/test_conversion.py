"""GGUF files are converted once, or refused."""

import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.common.models.gguf import reader as gguf_models
from octavo.common.models.resolve import resolve_tokenizer
from octavo.engine.models.gguf_conversion.conversion import prepare
from octavo.engine.models.mapped_tensors import open_tensors
from octavo.engine.models.resolve_or_convert import resolve
from tests.common.models import tiny_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path) -> Path:
    return tiny_gguf.write(tmp_path / "tiny.v1.gguf")


def _load(directory: str, **options):
    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, **options)


def _converted(cache: Path) -> list[Path]:
    made = [path for path in cache.iterdir() if path.is_dir()]
    return [path for path in made if not path.name.endswith(gguf_models.TOKENIZER)]


def test_the_model_is_the_file_s(file):
    tokens = torch.arange(40).reshape(1, -1)
    with torch.inference_mode():
        expected = tiny_gguf.make_model()(tokens).logits
        model = _load(resolve(str(file)))
        torch.testing.assert_close(model(tokens).logits, expected)
    assert model.config.max_position_embeddings == 512


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Kind.F32, torch.float32),
        (Kind.F16, torch.float16),
        (Kind.BF16, torch.bfloat16),
        (Kind.Q8_0, torch.bfloat16),
    ],
)
def test_float_files_keep_their_type(tmp_path, kind, dtype):
    model = _load(resolve(str(tiny_gguf.write(tmp_path / "tiny.gguf", kind=kind))), dtype="auto")
    assert model.dtype == dtype
    exact = torch.from_numpy(tiny_gguf.tensors()["blk.1.ffn_up.weight"])
    own = model.model.layers[1].mlp.up_proj.weight.float()
    assert (own - exact).abs().max() < 0.01 * exact.abs().max()


def test_tokenizer_and_template_are_the_file_s(file):
    tokenizer = AutoTokenizer.from_pretrained(resolve(str(file)), local_files_only=True)
    tokens = tokenizer("hello 12<|end|>").input_ids
    assert tokenizer.convert_ids_to_tokens(tokens) == ["hello", "Ġ", "1", "2", "<|end|>"]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "hello 12"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<|start|>hello<|end|>"
    assert tokenizer.model_max_length == 512


def test_every_end_token_that_the_file_names_ends_an_output(file):
    model = _load(resolve(str(file)))
    assert model.config.eos_token_id == sorted([tiny_gguf.END, tiny_gguf.START])
    assert model.generation_config.eos_token_id == model.config.eos_token_id
    assert model.config.pad_token_id == tiny_gguf.PAD


def test_a_pre_tokenizer_that_is_not_known_is_refused_before_weights_are_read(tmp_path, cache):
    def rename(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = "new-one"

    path = tiny_gguf.write(tmp_path / "tiny.gguf", add=rename, leave_out="blk.1.ffn_up.weight")
    with pytest.raises(UnsupportedModelError, match="does not know its pre-tokenizer new-one"):
        resolve(str(path))
    assert not _converted(cache)


def test_a_file_is_converted_once(file, cache, tmp_path):
    first = Path(resolve(str(file)))
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(file)) == str(first)
    link = tmp_path / "link.gguf"
    link.symlink_to(file)
    assert resolve(str(link)) == str(first)
    moved = tmp_path / "elsewhere" / file.name
    moved.parent.mkdir()
    file.rename(moved)
    assert resolve(str(moved)) == str(first)
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    assert _converted(cache) == [first]


def test_another_file_in_its_place_is_converted_anew(file):
    first = resolve(str(file))
    times = file.stat()
    content = bytearray(file.read_bytes())

    content[-1] ^= 1  # the last byte of a weight, with a new file time
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    later = resolve(str(file))

    content[-1] ^= 2  # the same file time
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert len({first, later, resolve(str(file))}) == 3


def test_a_relative_path(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert resolve(file.name) == resolve(str(file))


def test_a_tokenizer_is_made_without_torch_and_for_the_model_too(file, cache):
    code = (
        "import sys\n"
        "from octavo.common.without_torch import keep_torch_out\n"
        "keep_torch_out()\n"
        "from octavo.common.models.resolve import resolve_tokenizer\n"
        "print(resolve_tokenizer(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    made = Path(done.stdout.splitlines()[-1])
    assert made.name.endswith(gguf_models.TOKENIZER)
    assert not _converted(cache)
    before = (made / "tokenizer.json").stat().st_mtime_ns
    model = Path(resolve(str(file)))
    assert (made / "tokenizer.json").stat().st_mtime_ns == before
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (model / name).read_bytes() == (made / name).read_bytes()
    assert resolve_tokenizer(str(file)) == str(model)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.2, 0.5, 0.99])
def test_a_file_that_is_cut_short(file, cache, share):
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match="cut short or damaged") as caught:
        resolve(str(file))
    assert "\n" not in str(caught.value)
    assert not _converted(cache)


@pytest.mark.parametrize("content", [b"", b"GG", b"not a model at all"])
def test_what_is_no_gguf_file(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ModelError, match=r"file is not a GGUF file; .* config\.json"):
        resolve(str(tmp_path / "file"))


def test_what_is_not_there(tmp_path, file):
    for name in (str(tmp_path / "none.gguf"), "none.gguf"):
        with pytest.raises(ModelError, match=r"there is no file /.*none\.gguf"):
            resolve(name)
    with pytest.raises(ModelError, match=rf"no config\.json; for {file.name}, give"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "clip"}, "transformers cannot read .*: GGUF model with arch.* clip"),
        ({"parts": 3}, "one of 3 parts: pass the first one, with llama.cpp's name"),
        ({"tokenizer": False}, "has no tokenizer"),
        ({"leave_out": "blk.1.ffn_up.weight"}, r"lacks 1 of .*model\.layers\.1\.mlp\.up_proj"),
    ],
)
def test_files_that_cannot_be_served(tmp_path, cache, options, message):
    path = tiny_gguf.write(tmp_path / "tiny.gguf", **options)
    with pytest.raises(ModelError, match=message) as caught:
        resolve(str(path))
    assert "\n" not in str(caught.value)
    assert not _converted(cache)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (777, r"has tensors of type 777, which Octavo does not know: use a file of .*Q4_K"),
        (int(Kind.Q8_1), r"has .* of type Q8_1, which Octavo does not read: use a file of .*Q4_K"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_types_that_are_not_known_are_refused_by_name(file, cache, number, message, packed):
    content = bytearray(file.read_bytes())
    reader = gguf.GGUFReader(file)
    (own,) = (own for own in reader.tensors if own.name == "blk.0.ffn_up.weight")
    at = own.field.offset + sum(part.nbytes for part in own.field.parts[:-2])
    assert int.from_bytes(content[at : at + 4], "little") == Kind.F32
    content[at : at + 4] = number.to_bytes(4, "little")
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        prepare(file, packed=packed)
    assert "\n" not in str(caught.value)
    assert not _converted(cache)


def test_a_tokenizer_takes_the_form_that_is_there(tmp_path, cache):
    file = tiny_gguf.write(tmp_path / "tiny.gguf", kind=Kind.Q8_0)
    packed = resolve(str(file), packed=True)
    assert resolve_tokenizer(str(file)) == packed
    assert len(_converted(cache)) == 1


def test_a_file_that_is_written_to_meanwhile(file, cache, monkeypatch):
    class Writing(gguf.GGUFReader):
        def __init__(self, path):
            super().__init__(path)
            os.utime(path, ns=(0, 0))

    monkeypatch.setattr(gguf, "GGUFReader", Writing)
    with pytest.raises(ModelError, match="was written to while it was converted"):
        resolve(str(file))
    assert not _converted(cache)


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_in_several_files(tmp_path, packed):
    whole = tiny_gguf.write(tmp_path / "tiny.gguf", kind=Kind.Q8_0)
    parts = [tmp_path / f"split-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    names = list(tiny_gguf.tensors())
    for number, part in enumerate(parts):
        tiny_gguf.write(part, kind=Kind.Q8_0, parts=3, only=names[number::3], fields=not number)
    expected = Path(resolve(str(whole), packed=packed))
    for given in parts[:2]:
        made = Path(resolve(str(given), packed=packed))
        assert made.name.startswith("split-00001-of-00003-")
        for name, own in open_tensors(expected).items():
            assert torch.equal(open_tensors(made)[name][...], own[...])
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"one of 3 parts, but split-00003-of-00003\.gguf is"):
        resolve(str(parts[0]), packed=packed)


def test_fields_are_those_of_ggufs_own_reader(file):
    ours, theirs = gguf_models.read(file).fields, gguf.GGUFReader(file).fields
    assert list(ours) == list(theirs)
    for name, field in theirs.items():
        own = ours[name]
        assert (own.types, list(own.data)) == (field.types, list(field.data))
        assert own.contents() == field.contents()
        assert sum(part.nbytes for part in own.parts) == sum(part.nbytes for part in field.parts)
