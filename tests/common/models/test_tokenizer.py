"""Tokens follow tokenizer.json, whichever transformers class the files name."""

import json
import random
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from octavo.common.models.errors import ModelError
from octavo.common.models.tokenizer import Texts, check_same, load_tokenizer, sample_texts
from octavo.engine.constraints.tokens import read_tokens
from octavo.engine.models.quantization.calibration import calibration_tokens
from octavo.router.text.tokenization import Tokenizers
from tests.common.models.tiny_tokenizers import FAMILIES
from tests.plain import shape

TYPES = (
    *("llama", "qwen2", "qwen3_5", "gpt2", "gemma", "gemma3_text", "starcoder2", "phi", "opt"),
    *("mistral", "gpt_neox", "mamba", "olmo", "cohere", "deepseek_v3", "mbart", None),
)
"""Classes for quick tests; None: no config.json."""
SMOLLM2 = "\n\n1. a"


def _texts() -> list[str]:
    """Return 200 texts that the loader does not compare itself."""
    rng = random.Random(0)
    return ["".join(rng.choices(sample_texts(), k=3)) for _ in range(200)]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Each family's tokenizer.json."""
    directory = tmp_path_factory.mktemp("families")
    for name, make in FAMILIES.items():
        make().save(str(directory / f"{name}.json"))
    return {name: directory / f"{name}.json" for name in FAMILIES}


def _lay_out(
    directory: Path, file: Path, *, model_type: str | None = "llama", **fields: object
) -> Path:
    directory.mkdir(exist_ok=True)
    shutil.copy(file, directory / "tokenizer.json")
    config = directory / "config.json"
    config.unlink(missing_ok=True)
    if model_type is not None:
        config.write_text(json.dumps({"model_type": model_type}))
    given = {name: value for name, value in fields.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(given))
    return directory


def _results(backend: Tokenizer, texts: list[str]) -> list[object]:
    found: list[object] = []
    for special in (False, True):
        ids = [one.ids for one in backend.encode_batch(texts, add_special_tokens=special)]
        found += [ids, backend.decode_batch(ids, skip_special_tokens=special)]
    return found


def _differ(directory: Path, texts: list[str]) -> bool:
    loaded = load_tokenizer(directory)
    file = Tokenizer.from_file(str(directory / "tokenizer.json"))
    same_tokens = loaded.get_vocab() == file.get_vocab(with_added_tokens=True)
    backend = loaded.backend_tokenizer
    return not same_tokens or _results(backend, texts) != _results(file, texts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("named", [None, "GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast"])
def test_tokens_are_those_of_the_file(files, tmp_path, family, named):
    directory = _lay_out(tmp_path / "m", files[family], tokenizer_class=named)
    assert not _differ(directory, _texts())


@pytest.mark.parametrize("model_type", TYPES)
def test_the_models_type_does_not_change_tokens(files, tmp_path, model_type):
    texts = _texts()
    for named in (None, "GPT2Tokenizer", "GemmaTokenizer"):
        for family in ("llama3", "llama2", *(["unigram"] if model_type == "mbart" else [])):
            directory = _lay_out(
                tmp_path / "m", files[family], model_type=model_type, tokenizer_class=named
            )
            assert not _differ(directory, texts), (named, family)


@pytest.mark.parametrize(
    ("family", "named"),
    [("llama3", "GPT2Tokenizer"), ("deepseek_v3", "Qwen2Tokenizer"), ("llama2", "GemmaTokenizer")],
)
def test_transformers_alone_changes_tokens(files, tmp_path, family, named):
    """The loader must handle it; otherwise it could be simpler."""
    directory = _lay_out(tmp_path / "m", files[family], tokenizer_class=named)
    texts = _texts()
    rebuilt = AutoTokenizer.from_pretrained(directory).backend_tokenizer
    file = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert _results(rebuilt, texts) != _results(file, texts)


@pytest.fixture
def smollm2(demo_model, tmp_path) -> Path:
    """The demo's tokenizer as declared in its hub repository."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(Path(demo_model) / name, tmp_path)
    config = json.loads((Path(demo_model) / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "GPT2Tokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


async def test_a_numbered_list_of_smollm2(smollm2):
    tokenizers = Tokenizers()
    loaded = await tokenizers.load(str(smollm2))
    assert loaded.encode(SMOLLM2) == [1116, 33, 30, 253]
    assert load_tokenizer(smollm2)(SMOLLM2)["input_ids"] == [1116, 33, 30, 253]
    tokenizers.close()


async def test_all_who_read_text_make_the_same_tokens(files, tmp_path):
    directory = _lay_out(tmp_path / "m", files["llama3"], tokenizer_class="GPT2Tokenizer")
    file = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizers = Tokenizers()
    router = await tokenizers.load(str(directory))
    table = read_tokens(directory, file.get_vocab_size(), [0])
    grammar = Tokenizer.from_str(table.json)
    assert table.size == file.get_vocab_size()
    for text in _texts():
        expected = file.encode(text).ids
        assert router.encode(text) == expected
        assert grammar.encode(text).ids == expected
        assert router.decode(expected) == file.decode(expected)
    text = Path(calibration_tokens.__code__.co_filename).with_name("calibration.txt").read_text()
    tokens = calibration_tokens(str(directory), shape(1, 1, 1, 32, 2000, 512)).tolist()
    assert tokens == file.encode(text).ids[: len(tokens)]
    tokenizers.close()


def test_special_tokens_that_the_file_does_not_have_are_left_out(files, tmp_path):
    """An example is `<|endoftext|>`, which transformers adds beyond the model's vocabulary."""
    added = {"5000": {"content": "<late>", "special": True, "lstrip": False, "rstrip": False}}
    directory = _lay_out(
        *(tmp_path / "m", files["smollm"]),
        tokenizer_class="GPT2Tokenizer",
        eos_token="<|im_end|>",
        pad_token="[PAD]",
        extra_special_tokens=["<extra>", "<|im_start|>"],
        added_tokens_decoder=added,
    )
    assert len(AutoTokenizer.from_pretrained(directory)) > 900
    loaded = load_tokenizer(directory)
    assert len(loaded) == 900
    assert max(loaded.added_tokens_decoder) < 900
    assert loaded.special_tokens_map == {"eos_token": "<|im_end|>"}
    assert loaded.extra_special_tokens == ["<|im_start|>"]
    assert loaded.pad_token is None
    assert set(loaded.all_special_tokens) == {"<|im_end|>", "<|im_start|>"}
    assert read_tokens(directory, 900, [1]).size == 900


@pytest.mark.parametrize("named", ["LlamaTokenizerFast", "TokenizersBackend", "GPT2Tokenizer"])
def test_the_file_says_which_tokens_are_added_around_a_text(files, tmp_path, named):
    directory = _lay_out(
        *(tmp_path / "m", files["llama3"]),
        tokenizer_class=named,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        add_bos_token=False,
        add_eos_token=True,
    )
    loaded = load_tokenizer(directory)
    bos = loaded.convert_tokens_to_ids("<|begin_of_text|>")
    assert loaded("a")["input_ids"] == [bos, *loaded("a", add_special_tokens=False)["input_ids"]]


def test_which_tokens_decoding_hides_is_the_files(files, tmp_path):
    """`<think>` is an added token but not special."""
    decoder = {"2": {"content": "<think>", "special": True, "normalized": False}}
    directory = _lay_out(
        *(tmp_path / "m", files["deepseek_v3"]),
        tokenizer_class="LlamaTokenizerFast",
        added_tokens_decoder=decoder,
        extra_special_tokens=["<think>"],
    )
    assert not _differ(directory, _texts())
    loaded = load_tokenizer(directory)
    tokens = loaded("<think>a", add_special_tokens=False)["input_ids"]
    assert loaded.decode(tokens, skip_special_tokens=True) == "<think>a"


def test_neither_the_files_padding_nor_its_truncation_is_used(files, tmp_path):
    tokenizer = Tokenizer.from_file(str(files["smollm"]))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "padded.json"))
    loaded = load_tokenizer(_lay_out(tmp_path / "m", tmp_path / "padded.json"))
    assert loaded.backend_tokenizer.truncation is None
    assert loaded.backend_tokenizer.padding is None
    plain = Tokenizer.from_file(str(files["smollm"]))
    assert loaded("a b c d e f g")["input_ids"] == plain.encode("a b c d e f g").ids


@pytest.mark.parametrize("named", [None, "GPT2Tokenizer", "T5Tokenizer", "CTRLTokenizer"])
@pytest.mark.parametrize("place", ["jinja", "text", "list", "folder"])
def test_transformers_reads_the_chat_templates(files, tmp_path, named, place):
    two = {"default": "{{ bos_token }}one", "tool_use": "{{ eos_token }}two"}
    template: object = two["default"]
    if place == "list":
        template = [{"name": name, "template": text} for name, text in two.items()]
    in_config = place in {"text", "list"}
    directory = _lay_out(
        *(tmp_path / "m", files["smollm"]),
        tokenizer_class=named,
        bos_token="<|im_start|>",
        eos_token={"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        chat_template=template if in_config else None,
        response_template={"fields": {}},
        model_max_length=77,
    )
    if not in_config:
        (directory / "chat_template.jinja").write_text(two["default"])
    if place == "folder":
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "tool_use.jinja").write_text(two["tool_use"])
    loaded = load_tokenizer(directory)
    several = place in {"list", "folder"}
    assert loaded.chat_template == (two if several else two["default"])
    assert loaded.response_template == {"fields": {}}
    assert loaded.model_max_length == 77
    one = loaded.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert one == "<|im_start|>one"


def test_without_a_tokenizer_json_transformers_class_is_used(files, tmp_path):
    directory = _lay_out(tmp_path / "m", files["gpt2"], tokenizer_class="GPT2Tokenizer")
    Tokenizer.from_file(str(directory / "tokenizer.json")).model.save(str(directory))
    (directory / "tokenizer.json").unlink()
    loaded = load_tokenizer(directory)
    assert type(loaded).__name__ == "GPT2Tokenizer"
    assert (
        loaded(SMOLLM2)["input_ids"] == Tokenizer.from_file(str(files["gpt2"])).encode(SMOLLM2).ids
    )


def test_a_difference_is_refused_with_both_lists():
    file = Path("m/tokenizer.json")
    right = Texts([[1, 2]], ["ab"])
    check_same(file, ["ab"], right, right)
    with pytest.raises(ModelError, match=r"m/tokenizer\.json .* 'ab' is \[1, 2\], not \[3\]"):
        check_same(file, ["ab"], Texts([[3]], ["ab"]), right)
    with pytest.raises(ModelError, match=r"m/tokenizer\.json .* \[1, 2\] is 'ab', not 'a b'"):
        check_same(file, ["ab"], Texts([[1, 2]], ["a b"]), right)


def test_a_class_that_decodes_otherwise_is_not_used(files, tmp_path):
    """It drops repeated tokens, as in speech recognition."""
    directory = _lay_out(tmp_path / "m", files["smollm"], tokenizer_class="ParakeetTokenizer")
    assert not _differ(directory, _texts())
