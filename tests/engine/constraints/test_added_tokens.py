"""Constraints that force the text of an added token: it is spelt in ordinary tokens."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from octavo.engine.constraints.constraint import Constraint, ConstraintError, ConstraintKind
from octavo.engine.constraints.grammar import compile_grammar
from octavo.engine.constraints.matcher import EndRule, Matcher
from octavo.engine.constraints.token_table import TokenTable
from octavo.engine.constraints.trial import try_constraint
from octavo.engine.speculation.method import Guess
from octavo.router.text.lark import escaped

DEMO_ENDS = ("<|im_end|>", "<|endoftext|>")
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]
"""Added tokens of Qwen 3, which are not special."""


class Vocabulary:
    """A tokenizer, and the grammars' view of it."""

    def __init__(self, tokenizer: Tokenizer, *ends: str) -> None:
        self.tokenizer = tokenizer
        self.ends = [tokenizer.token_to_id(end) for end in ends]
        self.size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.tokens = TokenTable(tokenizer.to_str(), self.size, tuple(self.ends)).build()
        added = tokenizer.get_added_tokens_decoder()
        self.added = {i: token.content for i, token in added.items()}

    def write(
        self, constraint: Constraint, seed: int = 0, most: int = 400, likes: tuple = ()
    ) -> tuple[str, list]:
        """Sample an output with drafts; return its text as clients get it, and its tokens.

        Args:
            constraint: The output's constraint.
            seed: Seed of the random numbers.
            most: Maximum tokens.
            likes: Sets of preferred tokens, the most preferred first.
        """
        try_constraint(constraint, self.tokens)
        matcher = Matcher(compile_grammar(constraint, self.tokens), self._words, EndRule())
        draw, output, new = random.Random(seed), [], []
        while len(output) < most:
            matcher.advance(new, Guess((), 4))
            assert matcher.error is None, (matcher.error, output)
            bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            for liked in likes:
                if one := liked.intersection(allowed):
                    allowed = sorted(one)
                    break
            new = matcher.draft or [draw.choice(allowed)]
            if new[0] in self.ends:
                return self.tokenizer.decode(output, skip_special_tokens=True), output
            output += new
        raise AssertionError(f"it never ends: {self.tokenizer.decode(output)!r}")

    @property
    def _words(self) -> int:
        return (self.size + 31) // 32


@pytest.fixture(scope="module")
def demo(demo_model) -> Vocabulary:
    return Vocabulary(Tokenizer.from_file(str(Path(demo_model) / "tokenizer.json")), *DEMO_ENDS)


@pytest.fixture(scope="module")
def thinking(demo_model) -> Vocabulary:
    tokenizer = Tokenizer.from_file(str(Path(demo_model) / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(one, special=False) for one in MARKERS])
    tokenizer.add_tokens([AddedToken("    ", special=False), AddedToken("[END]", special=False)])
    tokenizer.add_tokens([AddedToken(" strip", special=False, lstrip=True, rstrip=True)])
    tokenizer.add_special_tokens(
        [AddedToken("[INST]", special=True), AddedToken("é", special=True)]
    )
    return Vocabulary(tokenizer, "[END]", *DEMO_ENDS)


def _byte_fallback(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("</s>"), AddedToken("<s>")])
    tokenizer.add_tokens(
        [AddedToken("<b>"), AddedToken("▁▁", normalized=False), AddedToken("word")]
    )
    tokenizer.add_tokens([AddedToken("<0x0A>", normalized=False)])
    return tokenizer


BYTE_PIECES = ["<unk>", "</s>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁▁"]
MARKED_PIECES = ["<", ">", "b", "b>", "<b>", "s", "/", "</", "</s", "</s>"]


@pytest.fixture(scope="module")
def llama() -> Vocabulary:
    """Like Llama 2's and Gemma's: merges of everything, markers and runs of spaces included."""
    vocabulary = {one: i for i, one in enumerate(dict.fromkeys(BYTE_PIECES + MARKED_PIECES))}
    merges = [("▁", "▁"), ("b", ">"), ("<", "b>"), ("<", "/"), ("</", "s"), ("</s", ">")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    return Vocabulary(_byte_fallback(model), "</s>")


@pytest.fixture(scope="module")
def unigram() -> Vocabulary:
    """Like T5's: markers are pieces with scores."""
    pieces = dict.fromkeys(BYTE_PIECES + MARKED_PIECES)
    scores = [(one, -1.0 if one in MARKED_PIECES else -9.0) for one in pieces]
    return Vocabulary(_byte_fallback(models.Unigram(scores, 0, byte_fallback=True)), "</s>")


def _constraints(text: str) -> dict[str, tuple[Constraint, str]]:
    """Return constraints that force a text, and the only valid document of each."""
    named = {"type": "object", "properties": {text: {"const": 1}}, "required": [text]}
    closed = {**named, "additionalProperties": False}
    const, sentence = json.dumps({"const": text}), f"stop at {text} please"
    call = f'start: MARKER "\\n" doc\ndoc: %json {json.dumps(closed)}\n'
    schema, quoted = ConstraintKind.JSON_SCHEMA, json.dumps(text, ensure_ascii=False)
    return {
        "const": (Constraint(schema, (const,)), quoted),
        "enum": (
            Constraint(schema, (json.dumps({"enum": [sentence]}),)),
            json.dumps(sentence, ensure_ascii=False),
        ),
        "name": (Constraint(schema, (json.dumps(closed),)), f"{{{quoted}:1}}"),
        "regex": (Constraint(ConstraintKind.REGEX, (escaped(sentence),)), sentence),
        "choice": (Constraint(ConstraintKind.CHOICES, (text,)), text),
        "grammar": (
            Constraint(ConstraintKind.GRAMMAR, (f"start: {json.dumps(text * 2)}\n",)),
            text * 2,
        ),
        "arguments": (Constraint(ConstraintKind.GRAMMAR, (call,)), f"\n{{{quoted}:1}}"),
    }


KINDS = list(_constraints(""))


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["demo", "thinking", "llama", "unigram"])
def test_the_text_of_every_added_token_can_be_forced(request, name, kind):
    vocabulary = request.getfixturevalue(name)
    marker = next(i for i, one in vocabulary.added.items() if i not in vocabulary.ends)
    reference = vocabulary.added[marker]
    for text in dict.fromkeys([*vocabulary.added.values(), "<tool_call>", "<|im_end|>"]):
        if "▁" in text or (name == "unigram" and text == "<0x0A>"):
            continue  # such tokenizers read it as a space or a byte
        constraint, document = _constraints(text)[kind]
        texts = tuple(one.replace("MARKER", reference) for one in constraint.texts)
        written, output = vocabulary.write(Constraint(constraint.kind, texts))
        compact = "".join(written.split()) if kind in {"name", "arguments"} else written
        expected = "".join(document.split()) if kind in {"name", "arguments"} else document
        assert compact == expected, (text, output)
        controls = {i for i, one in vocabulary.added.items() if one[:1] + one[-1:] == "<>"}
        controls -= {vocabulary.tokenizer.token_to_id("<0x0A>")}
        allowed = {marker} if kind == "arguments" else set()
        assert controls & set(output) <= allowed


def test_a_name_in_a_grammar_means_the_token_and_a_text_the_text(thinking):
    grammar = """
        start: <tool_call> "<tool_call>" /<tool_call>/ </tool_call> doc // as <tool_call>
        # and <think>
        doc: %json {"const": "<tool_call>"}
    """
    written, output = thinking.write(Constraint(ConstraintKind.GRAMMAR, (grammar,)))
    assert written == '<tool_call><tool_call><tool_call></tool_call>"<tool_call>"'
    opening, closing = map(thinking.tokenizer.token_to_id, ("<tool_call>", "</tool_call>"))
    assert [one for one in output if one in thinking.added] == [opening, closing]


def test_an_error_has_the_tokens_own_names(thinking):
    with pytest.raises(ConstraintError) as found:
        compile_grammar(Constraint(ConstraintKind.GRAMMAR, ("start: <thonk>",)), thinking.tokens)
    assert "<thonk>" in str(found.value)
    assert "<think>" in str(found.value)


def test_any_text_may_hold_a_marker_but_no_control_token(thinking):
    (mask,) = np.empty((1, (thinking.size + 31) // 32), np.int32)
    state = compile_grammar(Constraint(ConstraintKind.REGEX, ("(?s:.*)x",)), thinking.tokens)
    state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    allowed = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
    texts = {thinking.added[one] for one in allowed & set(thinking.added)}
    assert texts == {"    ", " strip"}  # an added token that is no marker is text


@pytest.mark.parametrize("name", ["demo", "thinking"])
def test_other_text_is_spelt_as_the_tokenizer_spells_it(request, name):
    vocabulary = request.getfixturevalue(name)
    for text in ("def f(x):\n    return 1234\n", "Grüße, 世界! 🎉", " a  b   c", '{"a": [1, 2]}'):
        ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        assert vocabulary.tokens.tokenize_str(text) == ids


RUNS = re.compile(r"\s+")
NESTED = {"a": [{"b": {"c": [1, {"d": "x"}]}}, {}], "e": {"f": [[]]}}


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps({"const": NESTED}),)),
        Constraint(ConstraintKind.JSON_SCHEMA, ('{"type": "array", "maxItems": 3}',)),
        Constraint(ConstraintKind.JSON_OBJECT),
        Constraint(ConstraintKind.JSON_SCHEMA, ('{"type": "integer"}',)),
        Constraint(ConstraintKind.JSON_SCHEMA, ("true",)),
        Constraint(ConstraintKind.GRAMMAR, ('start: "x"? doc\ndoc: %json {"type": "object"}\n',)),
    ],
)
def test_a_model_that_likes_white_space_ends(demo, constraint, seed):
    pieces = {i: demo.tokenizer.decode([i]) for i in range(demo.size)}
    blank = {i for i, piece in pieces.items() if piece[-1:] in set("\n\r\t")}  # not in strings
    closing = {i for i, piece in pieces.items() if piece in {"}", "]", '"'}}
    likes = (blank, {*closing, *demo.ends})
    written, _ = demo.write(constraint, seed, most=200, likes=likes)
    outside = re.sub(r'"(?:\\.|[^"\\])*"', '""', written)
    assert max(map(len, RUNS.findall(outside)), default=0) <= 8
    assert written == written.rstrip()
    json.loads(written.removeprefix("x"))
