"""The hub's models are downloaded, or refused with one message that states a remedy."""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from octavo.common.ports import free_port
from tests.common.models.hub import SHA, running_hub, sha256_of

NAME = "owner/model"
SECONDS = 30.0
"""Generous timeout: importing the hub's library takes long on a busy machine."""
PROGRAM = """
import sys
from octavo.common.models import resolve
from octavo.common.models.errors import ModelError
for function, name in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        print(getattr(resolve, function)(name))
    except ModelError as error:
        print("refused:", error)
"""
CONFIG = json.dumps({"model_type": "llama"}).encode()
FILES = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "generation_config.json": b"{}",
    "model.safetensors": save({"a.weight": torch.ones(2)}),
    "pytorch_model.bin": b"a pickle",
    "README.md": b"a text",
}


@pytest.fixture(scope="module")
def hub():
    with running_hub() as running:
        yield running


@pytest.fixture
def ask(hub, tmp_path):
    """Resolve names in a new process, as the hub's library reads its settings once."""
    hub.reset()
    hub.models[NAME] = dict(FILES)

    def run(*asked, **environment):
        """Return a line for each pair of a function and a name, and log lines before it."""
        own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hub")} | environment
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *(asked or ("resolve_checkpoint", NAME))],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | own,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.fixture
def blobs(tmp_path):
    """The contents of the model's files in the cache."""
    return tmp_path / "hub" / "hub" / "models--owner--model" / "blobs"


def test_a_model_is_downloaded_and_kept(ask, hub):
    (said,) = ask()
    held = {file.name for file in Path(said).iterdir()}
    assert held == FILES.keys() - {"pytorch_model.bin", "README.md"}
    assert not any("pytorch_model.bin" in path for path in hub.asked)
    hub.asked.clear()
    assert ask() == [said]
    assert not any("resolve" in path for path in hub.asked), "it was downloaded again"
    logged, again = ask(HF_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    assert again == said
    assert "using the model's cached files" in logged


def test_a_revision_is_not_another_one(ask, hub, tmp_path):
    other = CONFIG.replace(b"llama", b"qwen3")
    (tmp_path / "here").mkdir()
    hub.models[f"{NAME}@v2"] = FILES | {"config.json": other}
    names = NAME, f"{NAME}@v2", f"{NAME}@{SHA}", f"{NAME}@gone", "here@v2", "demo@v2"
    own, second, third, *refused = ask(
        *(part for name in names for part in ("resolve_checkpoint", name))
    )
    assert own == third
    assert (Path(own) / "config.json").read_bytes() == CONFIG
    assert (Path(second) / "config.json").read_bytes() == other
    assert "no such revision of the model: 'owner/model@gone'" in refused[0]
    assert all("--revision is for models of the hub" in line for line in refused[1:])
    assert ask("resolve_tokenizer", f"{NAME}@v2") == [second]
    assert ask("resolve_checkpoint", f"{NAME}@v2", HF_HUB_OFFLINE="1")[-1] == second


GGUFS = [
    "model.Q4_K_M.gguf",
    "model.Q8_0.gguf",
    "mmproj-model.Q8_0.gguf",
    "BF16/model-BF16-00001-of-00002.gguf",
    "BF16/model-BF16-00002-of-00002.gguf",
    "small-IQ2_M.gguf",
    "large-IQ2_M.gguf",
]


def test_a_gguf_file_is_named_by_its_type(ask, hub):
    hub.models[NAME] = {name: name.encode() for name in GGUFS}
    kinds = ("q4_k_m", "Q8_0", "BF16", "IQ2_M", "Q5_0")
    first, second, split, *refused = ask(
        *(word for kind in kinds for word in ("gguf_file", f"{NAME}:{kind}"))
    )
    for path, name in zip((first, second, split), (*GGUFS[:2], GGUFS[3]), strict=True):
        assert path.endswith(f"/{name}")
        assert Path(path).read_text() == name
    assert Path(split).with_name(Path(GGUFS[4]).name).read_text() == GGUFS[4]
    assert not any("mmproj" in path or "IQ2" in path for path in hub.asked)
    there = "large-IQ2_M, model-BF16, model.Q4_K_M, model.Q8_0, small-IQ2_M"
    assert refused == [
        f"refused: the model {NAME!r} of the hub has {found}; there is: {names}"
        for found, names in (
            ("several GGUF files of IQ2_M", "large-IQ2_M, small-IQ2_M"),
            ("no GGUF file of Q5_0", there),
        )
    ]
    assert ask("gguf_file", f"{NAME}@{SHA}:Q8_0", "gguf_file", f"{NAME}:Q8_0@{SHA}") == [second] * 2
    assert ask("gguf_file", f"{NAME}:Q8_0", HF_HUB_OFFLINE="1")[-1] == second


def test_a_download_that_is_cut_off_goes_on(ask, hub, blobs):
    parts = {f"model-Q8_0-0000{part}-of-00002.gguf": bytes([part]) * (11 << 20) for part in (1, 2)}
    hub.models[NAME] = parts
    hub.cuts = dict.fromkeys(parts, (10 << 20) + 1)  # the library writes pieces of 10 MiB
    (said,) = ask("gguf_file", f"{NAME}:Q8_0")
    assert hub.ranges == [f"bytes={10 << 20}-"] * 2
    for name, content in parts.items():
        assert Path(said).with_name(name).read_bytes() == content

    hub.models[NAME] = {"other-Q4_0.gguf": b"0123456789"}
    (blobs / sha256_of(b"0123456789")).with_suffix(".incomplete").write_bytes(b"0123")
    hub.unavailable.add("other-Q4_0.gguf")
    (said,) = ask("gguf_file", f"{NAME}:Q4_0")
    assert "cannot be downloaded from the hub" in said
    assert "Start again: what was downloaded is kept" in said
    hub.unavailable.clear()
    (said,) = ask("gguf_file", f"{NAME}:Q4_0")
    assert hub.ranges[-1] == "bytes=4-"
    assert Path(said).read_bytes() == b"0123456789"
    assert not list(blobs.glob("*.incomplete"))


def test_a_file_whose_digest_differs_is_not_kept(ask, hub, blobs):
    hub.damaged.add("model.safetensors")
    (said,) = ask()
    assert "the file 'model.safetensors' of the model 'owner/model' was damaged" in said
    assert "SHA-256" in said
    assert sha256_of(FILES["model.safetensors"]) not in {path.name for path in blobs.iterdir()}
    assert not list(blobs.glob("*.incomplete"))
    hub.damaged.clear()
    (said,) = ask()
    assert (Path(said) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_full_disk_is_told_and_nothing_of_it_is_used(ask, hub, blobs):
    blobs.mkdir(parents=True)
    partial = (blobs / sha256_of(FILES["model.safetensors"])).with_suffix(".incomplete")
    partial.symlink_to("/dev/full")
    (said,) = ask()
    assert "cannot be stored in" in said
    assert "the disk is full. Free some space, or set HF_HOME" in said
    partial.unlink()
    (said,) = ask()
    assert (Path(said) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_the_files_of_a_gated_model_need_a_token(ask, hub):
    hub.models["owner/gguf"] = {"model.Q8_0.gguf": b"content"}
    hub.gated = dict.fromkeys((NAME, "owner/gguf"), "hf_right")
    pairs = "resolve_checkpoint", NAME, "gguf_file", "owner/gguf:Q8_0"
    for line in ask(*pairs):
        assert "is gated: request access on its page, and set HF_TOKEN" in line
    assert not any("refused" in line for line in ask(*pairs, HF_TOKEN="hf_right"))


def test_a_renamed_model_is_found_by_its_old_name(ask, hub):
    hub.models["owner/gguf"] = {"model.Q8_0.gguf": b"content"}
    hub.renamed = {"before/model": NAME, "before/gguf": "owner/gguf"}
    model, file = ask("resolve_checkpoint", "before/model", "gguf_file", "before/gguf:Q8_0")
    assert (Path(model) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert Path(file).read_bytes() == b"content"


def test_two_downloads_of_one_model_at_once(ask, hub):
    hub.delay = 0.5
    with ThreadPoolExecutor() as pool:
        one, other = [pool.submit(ask) for _ in range(2)]
    assert one.result() == other.result()
    (said,) = one.result()
    assert (Path(said) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    sent = [path for path in hub.asked if path.endswith("model.safetensors")]
    assert sum(path.startswith("GET") for path in sent) == 1


def test_a_tokenizer_is_downloaded_without_the_model(ask):
    (said,) = ask("resolve_tokenizer", NAME)
    assert {file.name for file in Path(said).iterdir()} == {"config.json", "tokenizer.json"}


def test_a_config_is_downloaded_without_the_weights(ask, hub):
    (said,) = ask("resolve_config", NAME)
    assert {file.name for file in Path(said).iterdir()} == {"config.json", "generation_config.json"}
    del hub.models[NAME]["model.safetensors"]
    (line,) = ask("resolve_config", NAME)
    assert "has no safetensors files" in line


def test_without_a_network_one_message_says_what_to_do(ask):
    began = time.monotonic()
    both = ("resolve_checkpoint", NAME, "resolve_tokenizer", NAME)
    lines = ask(*both, HF_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    assert time.monotonic() - began < SECONDS
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"refused: '{NAME}' is not a local directory (")
        for words in ("cannot be reached", "local directory", "HTTPS_PROXY", "HF_HUB_OFFLINE=1"):
            assert words in line
    (line,) = ask(HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in line


def test_a_refusal_of_the_hub_is_told(ask, hub):
    private = "has no model 'owner/.*', or it is private; .* HF_TOKEN"
    gated = "is gated: request access on its page, and set HF_TOKEN"
    told = {
        (404, "RepoNotFound"): private,
        (401, "RepoNotFound"): private,
        (403, "GatedRepo"): gated,
        (401, "GatedRepo"): gated,
        (403, ""): r"refuses the model .*\(HTTP status 403\): set HF_TOKEN",
        (503, ""): r"cannot be reached \(HTTP status 503\)",
    }
    hub.refusals = {f"owner/{number}": refusal for number, refusal in enumerate(told)}
    lines = ask(*(word for name in hub.refusals for word in ("resolve_checkpoint", name)))
    for line, words in zip(lines, told.values(), strict=True):
        assert line.startswith("refused: ")
        assert re.search(words, line), line


def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_downloaded(ask, hub):
    config = json.loads(CONFIG) | {"quantization_config": {"quant_method": "hqq"}}
    hub.models[NAME]["config.json"] = json.dumps(config).encode()
    (said,) = ask()
    assert "is quantized with hqq" in said
    assert not any("model.safetensors" in path for path in hub.asked)


def test_a_model_without_safetensors_is_refused(ask, hub):
    del hub.models[NAME]["model.safetensors"]
    (said,) = ask()
    assert "has no safetensors files; pytorch_model.bin is a pickle" in said


def test_a_model_that_is_larger_than_the_disk_is_refused(ask, hub):
    hub.sizes["model.safetensors"] = 10**18
    (said,) = ask()
    assert "cannot be stored in" in said
    assert "1000000000.0 GB are needed, and" in said
    assert "HF_HOME" in said
