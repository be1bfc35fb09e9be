"""Texts for comparing two tokenizers: scripts, code, digits, spaces, emoji."""

import random

# ruff: noqa: RUF001 - tokenizers differ in characters of many scripts
WRITTEN = (
    "Hello, world!",
    " Hello world",
    "  two  spaces   three",
    "\n\n1. a\n2. b",
    "I've we'LL you'Re 'RE don't DON'T",
    "3 33 333 3333 33333 333333 3333333",
    "3.14159 1,000,000 ½ ¾ ² Ⅻ ٣٤٥ १२३",
    "def f(x):\n    return x**2  # comment\n\tif x:\n\t\tpass",
    '<div class="a">text</div></s><b>',
    "naïve café Äpfel ﬁne ＡＢＣ ｶﾅ",
    "नमस्ते दुनिया का",
    "我想在apple工作1314151天～",
    "こんにちは、世界！カタカナ",
    "안녕하세요 세계 ㄱㄴㄷ",
    "Привет, мир! нещо",
    "مرحبا بالعالم، كيف؟",
    "שלום עולם",
    "ไทยภาษา",
    "😀🎉👩\u200d👩\u200d👧\u200d👦 🇩🇪 ✅",
    "e\u0301a\u0300 decomposed",
    "\t\ttabs\t and\r\nCRLF\r\n\r\n",
    "   ",
    "\n",
    "\n \n\n \n\n\n",
    " \n a",
    "a\u00a0b\u2003c\u3000d",
    "$1.50 + 20% = ^~|`<>",
    "https://example.com/a?b=c&d=e#f",
    '{"a": [1, 2.5, null]}',
    "!!!!!! ...... ------ ======",
    "ABCdefGHI XMLHttpRequest camelCase SNAKE_CASE",
    "İstanbul'da Ali'nin",
    "Ωμέγα ΣΊΣΥΦΟΣ",
    "កាន់តែពិសេសអាច",
    "\u200b\u200dzero\ufeff",
    "Việt việc hợp nhiều điều",
    "x" * 40,
    "a " * 30,
    "\ud7ff\u0800 一丁龥龦",
    "(parens) [b] {c} 'q' “q” ‘q’ —…",
    "_under__score_ *md* **b** # h",
    "´`'’ rock’n’roll",
    "0x1F 1e-9 12:34:56 2024-01-02",
    "𝔘𝔫𝔦 𐐀𐐨 𝟘𝟙",
)


def texts(*special: str, count: int = 200) -> list[str]:
    """Return various texts, the same in each run; some contain the special tokens."""
    chosen = [*WRITTEN, *(f"a {token} b{token}\n{token}c" for token in special), *special]
    draw = random.Random(0)
    parts = [part for text in WRITTEN for part in (*text.split(" "), text[:7], text[-5:])]
    parts += [" ", "  ", "\n", "\n\n", "\t", "1", "12", "1234", *special]
    while len(chosen) < count:
        number = draw.randint(1, 14)
        chosen.append("".join(draw.choice(parts) + draw.choice(" \n_"[:3]) for _ in range(number)))
    return chosen[:count]
