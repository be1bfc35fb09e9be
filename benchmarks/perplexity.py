"""Measure a served model's perplexity on a real text, for each type of weights.

    python -m benchmarks.perplexity [--model demo] [--variants bfloat16 int8 ...]
                                    [--gguf FILE ...] [--windows N] [--reference-windows 4]

It starts `octavo serve` for each variant and requests the log-probabilities of a prompt's tokens
over gRPC. So it measures the served model itself, with the executor's kernels and paged cache.

The text is Lewis Carroll's "Alice's Adventures in Wonderland" (1865, public
domain) as the Canterbury corpus has it, from the tests of the `brotli` package
on PyPI. It is cut into windows of 1,024 tokens that do not overlap; the last one is shorter. A
window's first token has no context and is not scored, so perplexity is exp of the mean negative
log-probability of all other tokens, each with 1 to 1,023 tokens before it.

Each file of `--gguf` is a variant too, named after the file. It is served in bfloat16; on a CPU its
weights stay in GGUF's blocks. Its tokenizer must give the same tokens as the model's.

Then each variant looks for needles: four sentences, each with another name and a number of six
digits, lie in 1,000 to 4,000 tokens of the text, and the prompt ends by asking for one of the
numbers. A number is found if each of its tokens is the most likely one.

A variant whose server does not start, for example because it lacks a flag, is skipped, and the page
lists it. transformers' own forward pass also scores the first windows in the same type (for a GGUF
file in float32, with dequantized weights), and both perplexities are printed. Results go to
`benchmarks/results/perplexity.md`.
"""

import argparse
import contextlib
import math
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import typer
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from benchmarks.report import table
from octavo import Client
from octavo.cli.local_server import local_server
from octavo.common.models.tokenizer import load_tokenizer
from octavo.engine.models import resolve_or_convert as models

PACKAGE = "brotli==1.1.0"
SHA256 = "81de08ac11bcb85841e440c13611c00b67d3bf82698314928d0b676362546724"
MEMBER = "Brotli-1.1.0/tests/testdata/alice29.txt"

WINDOW = 1024
SERVER = ("--num-blocks", "288", "--swap-space", "0", "--no-enable-prefix-caching")
"""Blocks for the longest prompt; no request repeats."""

NEEDLE_LENGTHS = (1000, 2000, 4000)
"""Tokens of the text that needles lie in."""
NEEDLE_NAMES = ("Harriet", "Edmund", "Beatrice", "Oswald")
NEEDLE_ROUNDS = 2
"""Number of prompts for each length and name."""

BASE = "bfloat16"
VARIANTS = {
    BASE: ("--dtype", "bfloat16"),
    "float32": ("--dtype", "float32"),
    "int8": ("--dtype", "bfloat16", "--quantization", "int8"),
    "int4": ("--dtype", "bfloat16", "--quantization", "int4"),
    "fp8 cache": ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3"),
    "int8 cache": ("--dtype", "bfloat16", "--kv-cache-dtype", "int8"),
}
"""`octavo serve`'s flags by variant; the first is the baseline."""

MARKS = {
    "int8": 0.01,
    "int4": 0.05,
    "fp8 cache": 0.01,
    "int8 cache": 0.001,
}
"""Maximum increase of each variant's perplexity over the baseline's, as a share."""

COLUMNS = (
    *("variant", "perplexity", f"ratio to {BASE}", "tokens", "seconds"),
    *("needles found", "log-probability of a needle"),
)
RESULTS = Path(__file__).parent / "results" / "perplexity.md"


OWN_DTYPES = ("bfloat16", "float32")
"""dtypes of the variants that transformers' forward pass also scores."""


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt that ends with the answer to its question.

    Attributes:
        tokens: The prompt's tokens.
        answer: Number of these that are the answer.
    """

    tokens: list[int]
    answer: int


@dataclass(frozen=True, slots=True)
class Score:
    """The result of one variant.

    Attributes:
        logprobs: Natural-log probabilities of the scored tokens, by window.
        seconds: Duration of scoring them, without loading.
        found: For each needle, whether its number was found.
        answers: Natural-log probability of each needle's number.
    """

    logprobs: list[list[float]]
    seconds: float
    found: list[bool] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)

    def perplexity(self, first: int | None = None) -> float:
        """Exp of the mean negative log-probability, over all windows or the first few."""
        values = [value for window in self.logprobs[:first] for value in window]
        return math.exp(-math.fsum(values) / len(values))

    @property
    def tokens(self) -> int:
        """The number of scored tokens."""
        return sum(map(len, self.logprobs))


def fetch_text() -> str:
    """Download the text's package with pip, check its hash, and return the text.

    Raises:
        subprocess.CalledProcessError: Pip cannot get it, or its hash differs.
    """
    with tempfile.TemporaryDirectory() as work:
        requirements = Path(work) / "requirements.txt"
        requirements.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
        command += ["--no-binary", ":all:", "--dest", work, "--requirement", str(requirements)]
        subprocess.run(command, check=True)
        with tarfile.open(next(Path(work).glob("*.tar.gz"))) as archive:
            member = archive.extractfile(MEMBER)
            assert member is not None
            return unwrap(member.read().decode("ascii"))


def unwrap(raw: str) -> str:
    """Join the lines of each paragraph; separate paragraphs by an empty line."""
    lines = raw.replace("\x1a", "").splitlines()  # the file ends with CP/M's end-of-file byte
    paragraphs: list[list[str]] = [[]]
    for words in map(str.split, lines):
        if words:
            paragraphs[-1] += words
        elif paragraphs[-1]:
            paragraphs.append([])
    return "\n\n".join(" ".join(words) for words in paragraphs if words)


def windows(tokens: Sequence[int]) -> list[list[int]]:
    """Cut the text's tokens into windows; drop a last window of one token, which scores nothing."""
    cut = [list(tokens[start : start + WINDOW]) for start in range(0, len(tokens), WINDOW)]
    return [window for window in cut if len(window) > 1]


def needles(tokenize: Callable[[str], list[int]], tokens: Sequence[int]) -> list[Needle]:
    """Return the needles' prompts.

    Args:
        tokenize: Returns the tokens of a text, without special ones.
        tokens: The tokens of the text around the needles.
    """
    draw, made = random.Random(0), []
    for length in NEEDLE_LENGTHS:
        for asked in NEEDLE_NAMES * NEEDLE_ROUNDS:
            start = draw.randrange(len(tokens) - length)
            hay, prompt = tokens[start : start + length], []
            numbers = {name: draw.randrange(100_000, 1_000_000) for name in NEEDLE_NAMES}
            step = length // len(numbers)
            for i, (name, number) in enumerate(numbers.items()):
                prompt += hay[i * step : i * step + step // 2]
                prompt += tokenize(f"\n\nThe secret number of {name} is {number}.\n\n")
                prompt += hay[i * step + step // 2 : (i + 1) * step]
            question = tokenize(f"\n\nThe secret number of {asked} is")
            answer = tokenize(f" {numbers[asked]}")
            made.append(Needle([*prompt, *question, *answer], len(answer)))
    return made


def search(client: Client, needle: Needle) -> tuple[bool, float]:
    """Return whether a server finds a needle's number, and the number's log-probability."""
    completion = client.generate(
        needle.tokens, max_tokens=1, temperature=0, prompt_logprobs=1
    ).complete()
    answer = completion.prompt_logprobs[-needle.answer :]
    found = all(token.top[0].token_id == token.token_id for token in answer)
    return found, math.fsum(token.logprob for token in answer)


def served_logprobs(client: Client, window: Sequence[int]) -> list[float]:
    """Return a server's log-probabilities of a window's tokens from the second on."""
    completion = client.generate(window, max_tokens=1, temperature=0, prompt_logprobs=0).complete()
    scored = completion.prompt_logprobs
    assert [token.token_id for token in scored] == list(window[1:])
    return [token.logprob for token in scored]


@torch.inference_mode()
def own_logprobs(model: PreTrainedModel, window: Sequence[int]) -> list[float]:
    """Return them from transformers' forward pass, with softmax in float32."""
    tokens = torch.tensor([window])
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    scored: list[float] = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].tolist()
    return scored


def score(logprobs: Callable[[list[int]], list[float]], cut: list[list[int]]) -> Score:
    """Score windows with `logprobs` and time it."""
    began = time.perf_counter()
    return Score([logprobs(window) for window in cut], time.perf_counter() - began)


def score_served(
    model: str, flags: Sequence[str], cut: list[list[int]], hidden: Sequence[Needle]
) -> Score | None:
    """Score a model with a new server with these flags; None if it does not start."""
    with contextlib.ExitStack() as stack:
        try:
            address = stack.enter_context(local_server(model, *SERVER, *flags))
        except typer.Exit:  # it has printed why
            return None
        client = stack.enter_context(Client(address))
        scored = score(lambda window: served_logprobs(client, window), cut)
        found, answers = zip(*(search(client, needle) for needle in hidden), strict=True)
        return replace(scored, found=list(found), answers=list(answers))


def score_own(path: str, dtype: str, cut: list[list[int]]) -> Score:
    """Score windows with transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    return score(lambda window: own_logprobs(model, window), cut)


def score_dequantized(file: Path, cut: list[list[int]]) -> Score:
    """Score windows with transformers alone, with a GGUF file's weights in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    return score(lambda window: own_logprobs(model, window), cut)


def by_name(files: Sequence[Path], text: str, tokens: Sequence[int]) -> dict[str, Path]:
    """Return GGUF files by their variants' names.

    Args:
        files: The files.
        text: The text to score.
        tokens: The text's tokens from the baseline model.

    Raises:
        ValueError: Two variants have one name, or a file's tokenizer gives other tokens.
        ModelError, OSError: A file cannot be read.
    """
    named = {file.stem: file.resolve() for file in files}
    if len(named) < len(files) or named.keys() & VARIANTS.keys():
        raise ValueError("two variants have one name")
    for name, file in named.items():
        tokenizer = load_tokenizer(Path(models.resolve(str(file), packed=True)))
        if tokenizer(text, verbose=False).input_ids != list(tokens):
            raise ValueError(f"{name} has other tokens than the model")
    return named


def verdicts(scores: dict[str, Score | None]) -> list[str]:
    """Return a line for each variant's limit, and whether it is met."""
    base = scores[BASE]
    assert base is not None
    lines = []
    for variant, score in scores.items():
        if score is None:
            lines.append(f"Left out: {variant}, whose server did not start.")
        elif variant in MARKS:
            change = score.perplexity() / base.perplexity() - 1
            met, most = "MET" if change <= MARKS[variant] else "NOT MET", 100 * MARKS[variant]
            lines.append(f"{met}: {variant} within {most:g}% of {BASE} ({change:+.2%}).")
    return lines


def agreement(variant: str, served: Score, own: Score) -> str:
    """Return both perplexities of the windows that transformers scored too."""
    count = len(own.logprobs)
    return (
        f"{variant}, first {count} windows: {served.perplexity(count):.4f} served,"
        f" {own.perplexity():.4f} from transformers' own forward pass."
    )


def rows(scores: dict[str, Score | None]) -> list[tuple[str, ...]]:
    """Return the table's rows."""
    base = scores[BASE]
    assert base is not None
    return [
        (
            variant,
            f"{score.perplexity():.4f}",
            f"{score.perplexity() / base.perplexity():.4f}",
            f"{score.tokens:,}",
            f"{score.seconds:.0f}",
            f"{sum(score.found)} of {len(score.found)}",
            f"{math.fsum(score.answers) / max(len(score.answers), 1):.2f}",
        )
        for variant, score in scores.items()
        if score is not None
    ]


def markdown(model: str, scores: dict[str, Score | None], notes: Sequence[str]) -> str:
    """Return the results as a page."""
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"{os.cpu_count()}-core CPU"
    made = (
        f"Made by `python -m benchmarks.perplexity`, {datetime.now(UTC):%Y-%m-%d}, {model} on a"
        f" {device}. Text: *Alice's Adventures in Wonderland* (1865, public domain), in windows"
        f" of {WINDOW:,} tokens that do not overlap; a window's first token is not scored."
    )
    listed = "\n".join(f"- {note}" for note in notes)
    scored_rows = table(COLUMNS, rows(scores))
    return f"# Perplexity of a served model\n\n{made}\n\n{scored_rows}\n\n{listed}\n"


def main() -> None:
    """Score the requested variants; print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.DEMO)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--gguf", nargs="+", type=Path, default=[], help="files of the model")
    parser.add_argument("--windows", type=int, help="only the first ones; then nothing is written")
    parser.add_argument("--reference-windows", type=int, default=4, help="0: no reference")
    arguments = parser.parse_args()

    path, text = models.resolve(arguments.model), fetch_text()
    tokenizer = load_tokenizer(Path(path))
    tokens = tokenizer(text, verbose=False).input_ids
    hidden = needles(lambda piece: tokenizer(piece, add_special_tokens=False).input_ids, tokens)
    files = by_name(arguments.gguf, text, tokens)
    cut = windows(tokens)[: arguments.windows]
    variants = [BASE, *(variant for variant in arguments.variants if variant != BASE)]
    scores = {
        variant: score_served(arguments.model, VARIANTS[variant], cut, hidden)
        for variant in variants
    }
    for name, file in files.items():
        scores[name] = score_served(str(file), VARIANTS[BASE], cut, hidden)
    if scores[BASE] is None:
        sys.exit(f"{BASE} could not be served, and it is the baseline")
    notes = verdicts(scores)
    held = cut[: arguments.reference_windows]
    for dtype in OWN_DTYPES:
        served = scores.get(dtype)
        if held and served is not None:
            notes.append(agreement(dtype, served, score_own(path, dtype, held)))
    for name, file in files.items():
        served = scores[name]
        if held and served is not None:
            notes.append(agreement(name, served, score_dequantized(file, held)))
    page = markdown(arguments.model, scores, notes)
    print(page)
    if arguments.windows is None:
        RESULTS.write_text(page)


if __name__ == "__main__":
    main()
