"""Tokenizers of GGUF files are those of the checkpoints that the files were converted from."""

import json
import re
from functools import cache
from pathlib import Path

import gguf
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.common.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from octavo.common.models.gguf.tokenizer import GgufTokenizer
from tests.common.models import vocabulary_gguf
from tests.common.models.tokenizer_texts import texts

# ruff: noqa: RUF001 - tokenizers differ in characters of many scripts
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
"""Markers of DeepSeek: outside the alphabet of byte-level tokens."""
SPECIAL = [BOS, EOS, "<|im_end|>", "</think>"]

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = GPT4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
DEEPSEEK3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
CASED = (
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭ"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
CHINESE = "[一-龥\u0800-一가-\ud7ff]+"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


def _split(*regexes: str, digits: bool = False) -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]
    if digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    return pre_tokenizers.Sequence([*steps, _bytes(use_regex=False)])


def _bytes(*, use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes()])


ORIGINALS = {
    "llama-bpe": _split(LLAMA3),
    "dbrx": _split(LLAMA3),
    "glm4": _split(LLAMA3),
    "qwen2": _split(QWEN2),
    "deepseek-r1-qwen": _split(QWEN2),
    "stablelm2": _split(QWEN2),
    "qwen35": _split(QWEN35),
    "gpt-4o": _split(GPT4O),
    "tekken": _split(TEKKEN),
    "deepseek-llm": _split(
        "[\r\n]", CASED, "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", CHINESE, digits=True
    ),
    "deepseek-coder": _split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE, digits=True),
    "deepseek-v3": _split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3),
    "falcon": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            _bytes(),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    ),
    "gpt-2": _bytes(),
    "mpt": _bytes(),
    "smollm": _digits(),
    "starcoder": _digits(),
    "command-r": _digits(),
    "bloom": _split(BLOOM),
    "viking": _split(BLOOM, digits=True),
}
"""The pre-tokenizers of families' tokenizer.json, by llama.cpp's names."""
COMPOSED = {"qwen2", "qwen35", "mpt", "command-r"}
"""Names whose tokenizer.json normalizes texts to NFC."""
WHOLE_WORDS = {"llama-bpe", "tekken"}
"""Names whose tokenizer.json ignores merges for a word that is a token."""
LLAMA_CPP_NAMES = """
    default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano
    deepseek-llm deepseek-coder deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 jina-es
    jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jais-2 gemma4
    granite-embed-multi-311m sarvam-moe jina-v1-en jina-v2-code roberta-bpe whitespace refact
    command-r qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35 stablelm2 olmo dbrx smaug-bpe poro-chat
    glm4 chatglm-bpe viking jais tekken smollm codeshell bloom gpt3-finnish exaone exaone4
    exaone-moe chameleon minerva-7b megrez gpt-4o llama4 kanana2 talkie granite-embed-multi-97m
    tiny_aya cohere2moe superbpe trillion granite-docling bailingmoe bailingmoe2 llada-moe
    seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm kimi-k2 ufakzeka grok-2 afmoe laguna minimax-m2
    solar-open mellum2
"""
LLAMA_CPP = LLAMA_CPP_NAMES.split()
"""All names that llama.cpp knows."""


@cache
def _original(name: str) -> Tokenizer:
    """Return a tokenizer like the family's, trained on the texts."""
    made = Tokenizer(models.BPE(ignore_merges=name in WHOLE_WORDS))
    made.pre_tokenizer = ORIGINALS[name]
    if name in COMPOSED:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        texts(),
        trainers.BpeTrainer(
            vocab_size=700,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    made.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL[:-1]])
    made.add_tokens([AddedToken(SPECIAL[-1], normalized=False)])
    return made


def _pieces(*, prefix: bool = True) -> Tokenizer:
    """Return a tokenizer like Llama 2's, or like Gemma's without the space before texts."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "▁")
    trained.normalizer = spaces
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=first, show_progress=False)
    trained.train_from_iterator(texts(count=60), trainer)
    model = json.loads(trained.to_str())["model"]
    made = Tokenizer(
        models.BPE(
            model["vocab"],
            [tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        made.normalizer = spaces
    made.decoder = decoders.Sequence(steps)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.add_special_tokens([AddedToken(token, normalized=False) for token in first[:3]])
    return made


def _read(path: Path) -> GgufTokenizer:
    return GgufTokenizer.read(gguf.GGUFReader(path))


def _differing(one: Tokenizer, other: Tokenizer, *special: str) -> list[str]:
    """Return those of 200 texts that two tokenizers encode or decode differently."""

    def tokens(tokenizer: Tokenizer, text: str) -> tuple[list[int], str, str]:
        ids = tokenizer.encode(text).ids
        return ids, tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)

    return [text for text in texts(*special) if tokens(one, text) != tokens(other, text)]


@pytest.mark.parametrize("name", ORIGINALS)
def test_texts_are_divided_as_the_family_s_tokenizer_json_divides_them(tmp_path, name):
    original = _original(name)
    file = vocabulary_gguf.write(
        tmp_path / "a.gguf", original, pre=name, add_bos_token=False, fill_up_to=720
    )
    made = _read(file).build()
    assert _differing(original, made, *SPECIAL) == []
    assert made.get_vocab_size() == original.get_vocab_size()


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_every_name_of_llama_cpp_has_its_regexes_or_is_refused(tmp_path, name):
    original = _original("gpt-2")
    file = vocabulary_gguf.write(tmp_path / "a.gguf", original, pre=name, add_bos_token=False)
    if name not in PRE_TOKENIZERS:
        with pytest.raises(UnsupportedModelError, match=name):
            _read(file).build()
        return
    made = _read(file).build()
    for text in texts(*SPECIAL):
        ids = made.encode(text).ids
        composed = made.normalizer.normalize_str(text) if made.normalizer else text
        assert made.decode(ids, skip_special_tokens=False) == composed


@pytest.mark.parametrize(
    ("pre", "message"),
    [
        (None, r"tokenizer\.ggml\.pre is missing.*gguf-new-metadata --pre-tokenizer"),
        ("default", r"tokenizer\.ggml\.pre says default.*gguf-new-metadata --pre-tokenizer"),
        ("new-one", r"does not know its pre-tokenizer new-one .*it knows .*qwen2"),
    ],
)
def test_a_pre_tokenizer_that_nobody_knows_is_refused(tmp_path, pre, message):
    file = vocabulary_gguf.write(tmp_path / "a.gguf", _original("gpt-2"), pre=pre)
    with pytest.raises(UnsupportedModelError, match=message):
        _read(file).build()


@pytest.mark.parametrize("model", ["t5", "bert", "rwkv", "plamo2", "none"])
def test_other_kinds_of_tokenizers_are_refused_by_name(tmp_path, model):
    file = vocabulary_gguf.write(tmp_path / "a.gguf", _original("gpt-2"), model=model)
    with pytest.raises(UnsupportedModelError, match=rf"kind {model} .*gpt2, llama, gemma4"):
        _read(file).build()


def test_control_tokens_keep_their_spelling_and_ids(tmp_path):
    original = _original("deepseek-v3")
    bos, eos = original.token_to_id(BOS), original.token_to_id(EOS)
    file = vocabulary_gguf.write(
        tmp_path / "a.gguf",
        original,
        pre="deepseek-v3",
        bos_token_id=bos,
        eos_token_id=eos,
        add_bos_token=True,
    )
    _read(file).save(tmp_path)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert made.encode(f"a{EOS}").ids == [bos, *original.encode(f"a{EOS}").ids]
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert (loaded.bos_token, loaded.bos_token_id) == (BOS, bos)
    assert (loaded.eos_token, loaded.eos_token_id) == (EOS, eos)
    assert len(loaded) == original.get_vocab_size()
    for text in texts(*SPECIAL):
        assert loaded(text).input_ids == made.encode(text).ids


def _with_tokens(*added: str, plain: str = "") -> Tokenizer:
    made = Tokenizer.from_str(_original("gpt-2").to_str())
    made.add_special_tokens([AddedToken(token, normalized=False) for token in added])
    if plain:
        made.add_tokens([AddedToken(plain, normalized=False)])
    return made


@pytest.mark.parametrize(
    "end",
    [
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
        *("<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("</s>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", EOS, "<|call|>", "<|return|>"),
    ],
)
def test_end_tokens_are_found_by_their_names(tmp_path, end):
    tokenizer = _with_tokens("<other>", end)
    other = tokenizer.token_to_id("<other>")
    file = vocabulary_gguf.write(tmp_path / "a.gguf", tokenizer, pre="gpt-2", eos_token_id=other)
    always = {tokenizer.token_to_id(token) for token in (EOS, "<|im_end|>")}
    assert set(_read(file).ends) == always | {other, tokenizer.token_to_id(end)}


@pytest.mark.parametrize(
    "added",
    [
        ("<|end|>", "<|call|>", "<|return|>"),
        ("<|end|>", "<|calls|>", "<|flush|>"),
        ("</s>", "<|tool_response>"),
    ],
)
def test_what_ends_a_message_within_a_turn_ends_no_output(tmp_path, added):
    tokenizer = _with_tokens(*added)
    ends = _read(vocabulary_gguf.write(tmp_path / "a.gguf", tokenizer, pre="gpt-2")).ends
    assert tokenizer.token_to_id(added[0]) not in ends
    assert {tokenizer.token_to_id(token) for token in added[1:]} <= set(ends)


def test_a_tag_of_html_ends_no_output(tmp_path):
    tokenizer = _with_tokens(plain="</s>")
    file = _read(vocabulary_gguf.write(tmp_path / "a.gguf", tokenizer, pre="gpt-2"))
    assert tokenizer.token_to_id("</s>") not in file.ends
    assert file.build().decode(tokenizer.encode("a</s>").ids) == "a</s>"


def test_fields_of_end_tokens_count(tmp_path):
    tokenizer = _with_tokens("<x>", "<y>", "<z>")
    ids = [tokenizer.token_to_id(token) for token in ("<x>", "<y>", "<z>")]
    fields = dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), ids, strict=True))
    file = vocabulary_gguf.write(tmp_path / "a.gguf", tokenizer, pre="gpt-2", **fields)
    assert set(ids) <= set(_read(file).ends)


@pytest.mark.parametrize(
    ("pre", "fields", "before", "after"),
    [
        ("llama-bpe", {}, [BOS], []),
        ("tekken", {}, [BOS], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("qwen2", {}, [], []),
        ("qwen2", {"add_bos_token": True}, [BOS], []),
        ("qwen2", {"add_eos_token": True}, [], [EOS]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [BOS], [EOS]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_or_its_pre_tokenizer_says(
    tmp_path, pre, fields, before, after
):
    original = _original("gpt-2")
    ids = {
        "bos_token_id": original.token_to_id(BOS),
        "eos_token_id": original.token_to_id(EOS),
    }
    file = vocabulary_gguf.write(tmp_path / "a.gguf", original, pre=pre, **ids, **fields)
    made = _read(file).build()
    bare = made.encode("Hello", add_special_tokens=False).tokens
    assert made.encode("Hello").tokens == [*before, *bare, *after]
    assert made.encode("", add_special_tokens=True).tokens == [*before, *after]


def test_a_bos_token_that_the_file_does_not_name_is_refused(tmp_path):
    file = vocabulary_gguf.write(tmp_path / "a.gguf", _original("llama-bpe"), pre="llama-bpe")
    with pytest.raises(UnsupportedModelError, match=r"adds a BOS token.*bos_token_id"):
        _read(file).build()


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_is_the_tokenizer_json_s(tmp_path, prefix):
    original = _pieces(prefix=prefix)
    file = vocabulary_gguf.write(
        tmp_path / "a.gguf",
        original,
        model="llama",
        pre="default",
        fill_up_to=620,
        **({} if prefix else {"add_space_prefix": False}),
    )
    read = _read(file)
    assert _differing(original, read.build(), "<s>", "</s>") == []
    assert read.ends == [2]


def test_spaces_that_llama_cpp_respells_are_spelt_as_before(tmp_path):
    original = _pieces(prefix=False)
    original.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("\n\n", normalized=False)])
    file = vocabulary_gguf.write(
        tmp_path / "a.gguf", original, model="llama", add_space_prefix=False
    )
    made = _read(file).build()
    assert "▁▁" in made.get_vocab()
    assert "  " not in made.get_vocab()
    assert made.encode("a▁▁b\n\nc").tokens == original.encode("a▁▁b\n\nc").tokens


@pytest.mark.parametrize(
    ("architecture", "name", "strips"),
    [("phi3", "", True), ("llama", "Phi 3 mini", True), ("llama", "phi-3", True), ("llama", "", 0)],
)
def test_spaces_after_phi_3_s_control_tokens_are_left_out(tmp_path, architecture, name, strips):
    original = _pieces()
    original.add_special_tokens([AddedToken("<|user|>", normalized=False, rstrip=bool(strips))])
    file = vocabulary_gguf.write(
        tmp_path / "a.gguf", original, model="llama", architecture=architecture, name=name
    )
    made = _read(file).build()
    text = "<|user|>\n  Hello<s> a"
    assert made.encode(text).ids == original.encode(text).ids


def test_gemma_4_has_merges_and_a_bos_token(tmp_path):
    original = _pieces(prefix=False)
    file = vocabulary_gguf.write(
        tmp_path / "a.gguf",
        original,
        model="gemma4",
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        add_bos_token=False,  # wrong, but as in some files
    )
    assert _differing(original, _read(file).build(), "<s>", "</s>") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merges": None}, "has no merges"),
        ({"merges": ["no pair"]}, "is damaged"),
        ({"merges": ["nopair"]}, "is damaged"),
        ({"tokens": None}, "has no tokens"),
        ({"tokens": ["a", "b", "a"]}, "has the token 'a' twice"),
    ],
)
def test_damaged_fields_are_refused(change, message):
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": []} | change
    held = {name: value for name, value in fields.items() if value is not None}
    with pytest.raises(ModelError, match=re.escape(message)):
        GgufTokenizer(held).build()


def test_scores_that_are_all_the_same_are_refused():
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "abc"]
    types = [2, 3, 3, 1, 1, 1, 1]
    fields = {"model": "llama", "tokens": tokens, "token_type": types, "scores": [-1000.0] * 7}
    with pytest.raises(UnsupportedModelError, match="all its tokens have one score"):
        GgufTokenizer(fields).build()


def test_a_padding_token_that_is_text_stays_text(tmp_path):
    original = _original("gpt-2")
    sign = original.token_to_id("!")
    file = vocabulary_gguf.write(tmp_path / "a.gguf", original, pre="gpt-2", padding_token_id=sign)
    _read(file).save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert loaded.decode(loaded("a!").input_ids, skip_special_tokens=True) == "a!"


def test_templates_of_several_names_are_kept(tmp_path):
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a"],
        "merges": [],
        "chat_template": "plain",
        "chat_templates": ["tool_use"],
        "chat_template.tool_use": "tools",
    }
    GgufTokenizer(fields).save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
