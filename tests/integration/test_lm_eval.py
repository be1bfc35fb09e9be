"""lm-eval, as PyPI has it, gets the numbers from a server that its own backend computes.

It need not be in the project's environment: `pip install lm-eval[api,hf]` anywhere on PATH.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from octavo.common.ports import free_port
from tests.integration.conftest import SMALL

PROGRAM = shutil.which(
    "lm_eval", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="needs lm-eval: pip install lm-eval[api,hf]"),
]
CHOICES = [
    ("Water that is cold enough becomes", [" ice", " gold", " paper", " a loud song"], 0),
    ("The opposite of up is", [" blue", " down", " seven", " quickly"], 1),
    ("A cat has four", [" wheels", " windows", " legs", " letters"], 2),
    ("The capital of France is", [" Oslo", " Madrid", " Rome", " Paris"], 3),
    ("To see the stars, look up at", [" night", " your shoes", " noon", " the soup"], 0),
]
QUESTIONS = [
    ("Count: one, two, three,", " four, five, six"),
    ("Red, green and", " blue"),
    ("The sun rises in the", " east"),
]
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "writing": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "chrf"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    documents = {
        "choice": [{"question": q, "choices": c, "answer": a} for q, c, a in CHOICES],
        "writing": [{"question": q, "answer": a} for q, a in QUESTIONS],
    }
    for name, task in TASKS.items():
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents[name]))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        common = {"task": f"octavo_{name}", "test_split": "test", "doc_to_text": "{{question}}"}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump({**common, **source, **task}))
    return directory


@pytest.fixture(scope="module")
def evaluate(tasks, tmp_path_factory):
    """Run lm-eval; return its metrics and its samples' answers, by task."""

    def run(model: str, arguments: dict[str, str], names: list[str], *flags: str):
        out = tmp_path_factory.mktemp("out")
        listed = ",".join(f"{name}={value}" for name, value in arguments.items())
        done = subprocess.run(
            [PROGRAM, "--model", model, "--model_args", listed, "--include_path", str(tasks),
             "--tasks", ",".join(f"octavo_{name}" for name in names), "--output_path", str(out),
             "--log_samples", "--batch_size", "1", *flags],
            env={**os.environ, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1",
                 "HF_HOME": str(tasks / "cache")},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        (results,) = out.rglob("results_*.json")
        answers = {}
        for name in names:
            (samples,) = out.rglob(f"samples_octavo_{name}_*.jsonl")
            lines = map(json.loads, samples.read_text().splitlines())
            answers[name] = [line["resps"] for line in sorted(lines, key=lambda one: one["doc_id"])]
        metrics = json.loads(results.read_text())["results"]
        return {
            task: {k: v for k, v in of.items() if "," in k} for task, of in metrics.items()
        }, answers

    return run


@pytest.fixture(scope="module")
def exact(demo_model, launch_shared):
    """The demo model's HTTP address, in float32."""
    port = free_port()
    flags = ("--dtype", "float32", "--kv-cache-dtype", "auto", "--http-port", str(port))
    launch_shared("serve", "--model", "demo", *SMALL, *flags).wait_ready()
    return f"http://127.0.0.1:{port}/v1"


def numbers(answers: list) -> list[float]:
    """Return the log-likelihoods of all answers."""
    return [float(resp[0][0]) for one in answers for resp in one]


def test_completions_score_and_write_as_transformers(exact, evaluate, demo_model):
    own = {"pretrained": str(demo_model), "dtype": "float32"}
    metrics, answers = evaluate("hf", own, ["choice", "writing"], "--device", "cpu")
    served = {"model": "demo", "base_url": f"{exact}/completions", "tokenizer": str(demo_model)}
    served |= {"num_concurrent": "4", "max_retries": "1"}
    got, said = evaluate("local-completions", served, ["choice", "writing"])
    assert got["octavo_choice"] == pytest.approx(metrics["octavo_choice"], abs=1e-3, nan_ok=True)
    assert numbers(said["choice"]) == pytest.approx(numbers(answers["choice"]), abs=1e-3)
    assert said["writing"] == answers["writing"]


def test_chats_write_as_transformers(exact, evaluate, demo_model):
    own = {"pretrained": str(demo_model), "dtype": "float32"}
    _, answers = evaluate("hf", own, ["writing"], "--apply_chat_template", "--device", "cpu")
    served = {"model": "demo", "base_url": f"{exact}/chat/completions", "num_concurrent": "4"}
    _, said = evaluate("local-chat-completions", served, ["writing"], "--apply_chat_template")
    assert said["writing"] == answers["writing"]
