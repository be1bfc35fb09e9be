"""Pre-tokenizers of GGUF files: how `tokenizer.ggml.pre` splits text into words.

A file contains only a name, which llama.cpp's src/llama-vocab.cpp defines. As some of its regexes
are adapted to its own engine, those of the families' tokenizer.json are used where known.
"""

# ruff: noqa: RUF001 - the regexes contain signs of many scripts

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.common.models.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import normalizers, pre_tokenizers

DIGITS = r"\p{N}"
"""Step that splits off each digit; a class of its own in `tokenizers`."""
GPT2 = "gpt-2"
"""Step with GPT-2's regex; part of the byte-level step in `tokenizers`."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_SIGNS}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SIGNS_AND_SLASHES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_CASES = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
_GPT4O = rf"{_CASES}|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_SIGNS_AND_SLASHES}"
_CHINESE = "[一-龥\u0800-一가-\ud7ff]+"
_CHINESE_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭ"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_HAN_WORDS = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
)
_KIMI = (
    rf"[\p{{Han}}]+|{_BEFORE}{_HAN_WORDS[0]}*{_HAN_WORDS[1]}+{_CONTRACTIONS}?"
    rf"|{_BEFORE}{_HAN_WORDS[0]}+{_HAN_WORDS[1]}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = rf"{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_JAIS2 = (
    rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    + "".join(rf"|\s{{{run}}}(?!\S)" for run in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"|\s{1}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """The pre-tokenizer of a name: how it splits text, and related properties.

    Attributes:
        steps: Regexes, `DIGITS` or `GPT2`. Each splits the results of the previous one: its matches
            and the text between them become words.
        composes: Whether to normalize texts to Unicode's form NFC.
        ignore_merges: Whether a word that is itself a token is not split by merges.
        adds_bos: Whether texts begin with BOS if the file does not say.
    """

    steps: tuple[str, ...]
    composes: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def build(self) -> "pre_tokenizers.PreTokenizer":
        """Return the steps, with the byte-level step last."""
        from tokenizers import Regex, pre_tokenizers  # noqa: PLC0415 - only for GGUF files

        steps: list[pre_tokenizers.PreTokenizer] = []
        for step in self.steps:
            if step == DIGITS:
                steps.append(pre_tokenizers.Digits(individual_digits=True))
            elif step != GPT2:
                steps.append(pre_tokenizers.Split(Regex(step), "isolated"))
            else:
                steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
        if GPT2 not in self.steps:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)

    def normalizer(self) -> "normalizers.Normalizer | None":
        """Return the normalizer of texts before splitting."""
        from tokenizers import normalizers  # noqa: PLC0415 - only for GGUF files

        return normalizers.NFC() if self.composes else None


_GROUPS: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("qwen2 f2llmv2", PreTokenizer((_QWEN2,), composes=True)),
    (
        "deepseek-r1-qwen megrez kormo stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,), composes=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True)),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                "[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
                r"\s+$",
                _CHINESE,
                DIGITS,
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, DIGITS)),
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((r"\p{N}{1,3}", _CHINESE_AND_KANA, _DEEPSEEK3)),
    ),
    (
        "falcon",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    ),
    (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling",
        PreTokenizer((GPT2,)),
    ),
    ("mpt olmo", PreTokenizer((GPT2,), composes=True)),
    (
        "smollm starcoder refact codeshell exaone minerva-7b mellum2",
        PreTokenizer((DIGITS, GPT2)),
    ),
    ("command-r", PreTokenizer((DIGITS, GPT2), composes=True)),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, DIGITS))),
    ("jais-2", PreTokenizer((_JAIS2,))),
    ("kimi-k2", PreTokenizer((_KIMI,))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED_CODER,))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
    (
        "minicpm5",
        PreTokenizer((r"\p{N}{1,3}", rf"{_WORDS}|\p{{N}}+|{_SIGNS}"), ignore_merges=True),
    ),
    ("ufakzeka", PreTokenizer((rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SIGNS}",))),
    ("laguna", PreTokenizer((r"[^\n]+|[\n]+", _QWEN2))),
    (
        "youtu",
        PreTokenizer(
            (
                rf"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_CHINESE_AND_KANA}",
                rf"{_CASES}|\p{{N}}|{_SIGNS_AND_SLASHES}",
            ),
            ignore_merges=True,
        ),
    ),
)

PRE_TOKENIZERS = {name: made for names, made in _GROUPS for name in names.split()}
"""Known pre-tokenizers, by their names in files."""

REMEDY = (
    "convert the original checkpoint with a current llama.cpp, or name the pre-tokenizer of the"
    " model's family with `gguf-new-metadata --pre-tokenizer NAME IN OUT` (pip install gguf)"
)


def named(name: str | None) -> PreTokenizer:
    """Return the pre-tokenizer of a name.

    Raises:
        UnsupportedModelError: The name is missing or unknown.
    """
    if name is None or name == "default":
        # llama.cpp uses a default here, and warns that it is wrong for most models.
        raise UnsupportedModelError(
            f"its tokenizer.ggml.pre {'is missing' if name is None else 'says default'}, so the "
            f"way its tokenizer splits texts is unknown: {REMEDY}"
        )
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"Octavo does not know its pre-tokenizer {name} (tokenizer.ggml.pre); it knows"
            f" {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]
