"""OpenVINO, by optimum-intel: time questions about images for `benchmarks.images`.

    python -m peers.workers.openvino_images MODEL INPUTS TOKENS

INPUTS has one file of arrays for each image. The last line of the output is a JSON list: for each
image, the seconds of a call that generates one token, and of one that generates all.
"""

import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from optimum.intel import OVModelForVisualCausalLM

OPTIONS = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def main() -> None:
    """Export the model, and print the times."""
    path, inputs, tokens = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    with TemporaryDirectory(dir=path.parent) as directory:
        copy = Path(directory)
        for file in path.iterdir():
            (copy / file.name).symlink_to(file)
        _write_old_config(path, copy)
        model = OVModelForVisualCausalLM.from_pretrained(
            copy,
            export=True,
            load_in_8bit=False,
            ov_config={"INFERENCE_NUM_THREADS": int(os.environ["OMP_NUM_THREADS"])},
        )
        seconds = []
        for number in range(len(list(inputs.iterdir()))):
            arrays = np.load(inputs / f"{number}.npz")
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays}
            tensors.pop("mm_token_type_ids", None)  # unknown to this version of transformers
            for count in (1, tokens):
                began = time.perf_counter()
                model.generate(**tensors, max_new_tokens=count, **OPTIONS)
                seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds))


def _write_old_config(path: Path, copy: Path) -> None:
    """Write the config with the rotary settings where transformers 4 reads them."""
    config = json.loads((path / "config.json").read_text())
    text = config["text_config"]
    rope = dict(text.get("rope_parameters") or {})
    text["rope_theta"] = rope.pop("rope_theta", 10_000.0)
    if "mrope_section" in rope:
        text["rope_scaling"] = rope
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
