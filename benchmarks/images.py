"""Time questions about an image, beside transformers, at SmolVLM-256M's shape.

    python -m benchmarks.images [--tokens 64] [--rounds 3]

The model has SmolVLM-256M's sizes with random weights in bfloat16: the first token and the speed of
decoding do not depend on their values. `octavo serve` and transformers' generate get the same image
of 512 x 512 pixels, which SmolVLM cuts into 17 tiles of 64 tokens each, and the same question. A
second question about the image is measured after the first. Each time is the median of the rounds;
the image differs in every round.
"""

import argparse
import io
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.report import table
from octavo import Client
from octavo.cli.local_server import local_server
from octavo.client import Image as Picture
from octavo.client import Message
from octavo.common.models.tokenizer import load_tokenizer
from octavo.router.images.processor import load_processor
from tests.vision_models import FAMILIES, save_family

TEXT = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
QUESTIONS = "What is shown here?", "Which colours has it?"
SERVER = ("--num-blocks", "256", "--swap-space", "0")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        save_smolvlm(path)
        files = [png(number) for number in range(options.rounds)]
        rows = [
            of_octavo(path, files, options.tokens),
            of_transformers(path, files, options.tokens),
        ]
    head = ["", "first token, s", "tokens/s", "second question: first token, s"]
    print(table(head, rows))


def save_smolvlm(path: Path) -> None:
    """Save a random model of SmolVLM-256M's shape."""
    family = FAMILIES["smolvlm"]
    config = family.config | {"scale_factor": 4, "vision_config": VISION}
    config["text_config"] |= TEXT
    images = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    shape = replace(family, config=config, images=images, processor={"image_seq_len": 64})
    save_family("smolvlm", shape, path, std=0.02, dtype=torch.bfloat16)


def png(number: int) -> bytes:
    """Return an image of noise."""
    noise = np.random.default_rng(number).integers(0, 256, (512, 512, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def of_octavo(path: Path, files: list[bytes], tokens: int) -> list[str]:
    """Return the row of `octavo serve`."""
    first, speed, second = [], [], []
    with local_server(str(path), *SERVER) as address, Client(address) as client:
        for data in [png(1000), *files]:  # the first warms up
            times = []
            for question in QUESTIONS:
                began = time.perf_counter()
                chat = [Message("user", [Picture(data), question])]
                stream = client.generate(
                    chat, max_tokens=tokens, temperature=0, ignore_eos=True, token_ids=True
                )
                times.append(
                    [time.perf_counter() - began for each in stream for _ in each.token_ids]
                )
            first.append(times[0][0])
            second.append(times[1][0])
            speed.append((len(times[0]) - 1) / (times[0][-1] - times[0][0]))
    return ["octavo", *(f"{statistics.median(each[1:]):.2f}" for each in (first, speed, second))]


def of_transformers(path: Path, files: list[bytes], tokens: int) -> list[str]:
    """Return the row of transformers, which computes the image again for the second question."""
    from transformers import AutoModelForImageTextToText  # noqa: PLC0415 - after the server

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16).eval()
    tokenizer = load_tokenizer(path)
    loaded = load_processor(path, tokenizer)
    assert loaded is not None
    first, speed = [], []
    for data in [png(1000), *files]:
        began = time.perf_counter()
        image = Image.open(io.BytesIO(data)).convert("RGB")
        text = f"<|user|><image>{QUESTIONS[0]}<|end|>\n<|assistant|>"
        inputs = loaded.transformers(text=[text], images=[image], return_tensors="pt")
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        model.generate(**inputs, max_new_tokens=1, **options)
        first.append(time.perf_counter() - began)
        began = time.perf_counter()
        model.generate(**inputs, max_new_tokens=tokens, **options)
        whole = time.perf_counter() - began
        speed.append(max(tokens - 1, 1) / max(whole - first[-1], 1e-9))
    middle = statistics.median(first[1:])
    return ["transformers", f"{middle:.2f}", f"{statistics.median(speed[1:]):.2f}", f"{middle:.2f}"]


if __name__ == "__main__":
    main()
