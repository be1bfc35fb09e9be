"""The perplexity benchmark: its windows, its arithmetic, its verdicts."""

import math

import gguf
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.perplexity import (
    NEEDLE_LENGTHS,
    NEEDLE_NAMES,
    Score,
    agreement,
    by_name,
    needles,
    own_logprobs,
    rows,
    score,
    score_dequantized,
    unwrap,
    verdicts,
)
from benchmarks.perplexity import windows as cut
from octavo.engine.models.resolve_or_convert import resolve
from tests.common.models import tiny_gguf


def test_lines_are_joined_and_paragraphs_kept():
    raw = (
        "\r\n\r\n   CHAPTER I\r\n\r\n\r\n  Alice was  beginning\r\nto get tired\r\n\r\nEND\r\n\x1a"
    )
    assert unwrap(raw) == "CHAPTER I\n\nAlice was beginning to get tired\n\nEND"


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [(2048, [1024, 1024]), (2050, [1024, 1024, 2]), (2049, [1024, 1024]), (7, [7])],
)
def test_windows_are_the_text_in_order(tokens, lengths):
    windows = cut(range(tokens))
    assert [len(window) for window in windows] == lengths
    assert [token for window in windows for token in window] == list(range(sum(lengths)))


def test_each_needle_is_asked_for_and_told_in_its_prompt():
    made = needles(lambda text: list(map(ord, text)), [ord("a")] * 5000)
    asked = []
    for needle in made:
        text = "".join(map(chr, needle.tokens))
        question, answer = text[: -needle.answer], text[-needle.answer :]
        asked.append(question.rsplit(maxsplit=2)[1])
        assert question.count(f"of {asked[-1]} is{answer}.") == 1
        assert question.count("The secret number of ") == len(NEEDLE_NAMES) + 1
        assert text.count("a") > min(NEEDLE_LENGTHS)
    assert sorted(set(asked)) == sorted(NEEDLE_NAMES)
    assert len(asked) == len({tuple(needle.tokens) for needle in made})


def test_the_figure_is_exp_of_transformers_own_loss():
    model = tiny_gguf.make_model()
    draw = torch.Generator().manual_seed(1)
    windows = [torch.randint(256, (n,), generator=draw).tolist() for n in (300, 300, 41)]
    got = score(lambda window: own_logprobs(model, window), windows)
    with torch.inference_mode():
        losses = [
            (len(window) - 1) * model(torch.tensor([window]), labels=torch.tensor([window])).loss
            for window in windows
        ]
    assert got.tokens == 299 + 299 + 40
    assert got.perplexity() == pytest.approx(math.exp(sum(losses) / got.tokens), rel=1e-5)
    assert got.perplexity(1) == pytest.approx(math.exp(losses[0] / 299), rel=1e-5)


def test_verdicts_hold_each_variant_to_its_mark():
    def of(perplexity: float) -> Score:
        return Score([[-math.log(perplexity)] * 3], 1.0, [True, False], [-1.0, -2.0])

    scores = {"bfloat16": of(20.0), "int8": of(20.1), "int4": of(21.1), "float32": None}
    assert verdicts(scores) == [
        "MET: int8 within 1% of bfloat16 (+0.50%).",
        "NOT MET: int4 within 5% of bfloat16 (+5.50%).",
        "Left out: float32, whose server did not start.",
    ]
    assert rows(scores)[1] == ("int8", "20.1000", "1.0050", "3", "1", "1 of 2", "-1.50")
    assert len(rows(scores)) == 3
    assert "first 1 windows: 20.0000 served, 21.1000" in agreement("bfloat16", of(20.0), of(21.1))


def test_a_file_is_scored_with_its_own_weights_and_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    kind = gguf.GGMLQuantizationType.Q8_0
    file = tiny_gguf.write(tmp_path / "tiny-Q8_0.gguf", kind=kind)
    text = "hello 1 hello"
    tokens = AutoTokenizer.from_pretrained(resolve(str(file), packed=True))(text).input_ids
    assert by_name([file], text, tokens) == {"tiny-Q8_0": file}
    with pytest.raises(ValueError, match="tiny-Q8_0 has other tokens than the model"):
        by_name([file], text, tokens[:-1])
    with pytest.raises(ValueError, match="two variants have one name"):
        by_name([file, file], text, tokens)
    windows = [list(range(40, 80))]
    exact = score(lambda window: own_logprobs(tiny_gguf.make_model(), window), windows)
    found = score_dequantized(file, windows)
    assert found.tokens == 39
    assert found.perplexity() == pytest.approx(exact.perplexity(), rel=2e-2)
    assert found.logprobs != exact.logprobs
