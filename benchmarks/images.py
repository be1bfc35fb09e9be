"""Time questions about an image, beside transformers and OpenVINO.

    python -m benchmarks.images [--shape smolvlm-256m] [--tokens 64] [--rounds 3]

The model has the sizes of SmolVLM-256M or Qwen3-VL-2B, with random weights in bfloat16: the first
token and the speed of decoding do not depend on their values. All get the same images of 512 x 512
pixels, which SmolVLM cuts into 17 tiles of 64 tokens each, and the same question. A second question
about the image is measured after the first. Each time is the median of the rounds; the image
differs in every round. OpenVINO runs the model as optimum-intel exports it, in an environment of
its own.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.peers import environments
from benchmarks.peers.environments import Environment
from benchmarks.peers.registry import default_folder
from benchmarks.peers.worker_process import worker_command, worker_variables
from benchmarks.report import table
from octavo import Client
from octavo.cli.local_server import local_server
from octavo.client import Image as Picture
from octavo.client import Message
from octavo.common.models.tokenizer import load_tokenizer
from octavo.router.images.processor import load_processor
from tests.vision_models import FAMILIES, Family, save_family

SMOLVLM_TEXT = {
    "vocab_size": 49_280,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
SMOLVLM_VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
QWEN_TEXT = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
}
QWEN_VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
    "out_hidden_size": 2048,
}
QUESTIONS = "What is shown here?", "Which colours has it?"
SERVER = ("--num-blocks", "256", "--swap-space", "0")
OPENVINO = Environment(
    "openvino-images",
    (
        "optimum-intel==2.2.0",
        "openvino==2026.4.1",
        "openvino-tokenizers==2026.4.1.0",
        "nncf==3.4.0",
        "transformers==4.57.6",
        "torch==2.13.0",
        "pillow==13.0.0",
    ),
    without=("torchvision",),
)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default=next(iter(SHAPES)))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default=",".join(PEERS), help="which to run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=models_folder()) as directory:
        path = Path(directory) / options.shape
        save_model(options.shape, path)
        files = [png(number) for number in (1000, *range(options.rounds))]  # the first warms up
        rows = [
            [name, *PEERS[name](path, files, options.tokens).row()]
            for name in options.peers.split(",")
        ]
    print(table(["", "first token, s", "tokens/s", "second question: first token, s"], rows))


def models_folder() -> Path:
    """Return the folder for models, which need some GB; create it if necessary."""
    folder = default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_model(name: str, path: Path) -> None:
    """Save a random model of one of `SHAPES`."""
    kind, shape = SHAPES[name]
    save_family(kind, shape, path, std=0.02, dtype=torch.bfloat16)


def png(number: int) -> bytes:
    """Return an image of noise."""
    noise = np.random.default_rng(number).integers(0, 256, (512, 512, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


@dataclass(frozen=True, slots=True)
class Times:
    """A peer's times; the first round warms up and is not counted.

    Attributes:
        first: Seconds until the first token of each round.
        speed: Tokens a second after it.
        second: Seconds until the first token of the second question.
    """

    first: list[float]
    speed: list[float]
    second: list[float]

    def row(self) -> list[str]:
        """Return the medians."""
        columns = self.first, self.speed, self.second
        return [f"{statistics.median(column[1:]):.2f}" for column in columns]


def of_octavo(path: Path, files: Sequence[bytes], tokens: int) -> Times:
    """Measure `octavo serve`."""
    times = Times([], [], [])
    with local_server(str(path), *SERVER) as address, Client(address) as client:
        for data in files:
            for question, first in zip(QUESTIONS, (times.first, times.second), strict=True):
                began = time.perf_counter()
                chat = [Message("user", [Picture(data), question])]
                stream = client.generate(
                    chat, max_tokens=tokens, temperature=0, ignore_eos=True, token_ids=True
                )
                at = [time.perf_counter() - began for each in stream for _ in each.token_ids]
                first.append(at[0])
            times.speed.append((len(at) - 1) / (at[-1] - at[0]))
    return times


def of_transformers(path: Path, files: Sequence[bytes], tokens: int) -> Times:
    """Measure transformers, which computes the image again for the second question."""
    from transformers import AutoModelForImageTextToText  # noqa: PLC0415 - after the server

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16).eval()
    process = processor_of(path)

    def generate(data: bytes, count: int) -> float:
        began = time.perf_counter()
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        model.generate(**process(data), max_new_tokens=count, **options)
        return time.perf_counter() - began

    return times_of(generate, files, tokens)


def of_openvino(path: Path, files: Sequence[bytes], tokens: int) -> Times:
    """Measure OpenVINO, with the time in which the processor makes its inputs."""
    process, prepared = processor_of(path), []
    inputs = path.with_name("inputs")
    inputs.mkdir()
    for number, data in enumerate(files):
        began = time.perf_counter()
        arrays = {name: tensor.numpy() for name, tensor in process(data).items()}
        prepared += [time.perf_counter() - began] * 2
        np.savez(inputs / f"{number}.npz", **arrays)
    python = environments.provide(OPENVINO, default_folder())
    command = [*worker_command(python, "openvino_images"), str(path), str(inputs), str(tokens)]
    threads = len(os.sched_getaffinity(0))
    variables = {**os.environ, **worker_variables(threads)}
    output = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True).stdout
    seconds = json.loads(output.splitlines()[-1])
    wholes = (each + before for each, before in zip(seconds, prepared, strict=True))
    return times_of(lambda *_: next(wholes), files, tokens)


def times_of(generate: Callable[[bytes, int], float], files: Sequence[bytes], tokens: int) -> Times:
    """Return the times of a peer that generates one token, then all; see `of_openvino`."""
    times = Times([], [], [])
    for data in files:
        first, whole = generate(data, 1), generate(data, tokens)
        times.first.append(first)
        times.second.append(first)
        times.speed.append((tokens - 1) / max(whole - first, 1e-9))
    return times


def processor_of(path: Path) -> Callable[[bytes], Any]:
    """Return a function that makes the model's inputs of an image and the first question."""
    tokenizer = load_tokenizer(path)
    processor = load_processor(path, tokenizer)
    assert processor is not None

    def process(data: bytes) -> Any:  # noqa: ANN401 - transformers' mapping of tensors
        parts = [{"type": "image"}, {"type": "text", "text": QUESTIONS[0]}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        image = Image.open(io.BytesIO(data)).convert("RGB")
        return processor.transformers(text=[text], images=[image], return_tensors="pt")

    return process


def _smolvlm() -> Family:
    family = FAMILIES["smolvlm"]
    config = {"scale_factor": 4, "vision_config": SMOLVLM_VISION}
    config["text_config"] = family.config["text_config"] | SMOLVLM_TEXT
    images = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    return replace(
        family, config=family.config | config, images=images, processor={"image_seq_len": 64}
    )


def _qwen3_vl() -> Family:
    family = FAMILIES["qwen3_vl"]
    config = {"vision_config": QWEN_VISION, "tie_word_embeddings": True}
    config["text_config"] = family.config["text_config"] | QWEN_TEXT
    size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    images = family.images | {"patch_size": 16, "size": size}
    return replace(family, config=family.config | config, images=images)


SHAPES = {"smolvlm-256m": ("smolvlm", _smolvlm()), "qwen3-vl-2b": ("qwen3_vl", _qwen3_vl())}
"""Kind and sizes of each model."""
PEERS = {"octavo": of_octavo, "transformers": of_transformers, "openvino": of_openvino}
"""What measures each peer."""

if __name__ == "__main__":
    main()
