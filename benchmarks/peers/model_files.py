"""The model of a run, in the formats that the peers read.

By default it is the demo model: both formats hold the weights of its GGUF file, with matrices in 4
bits (Q4_1) and embeddings in 8, so that peers compute the same in different ways. Other models are
directories: those of `shapes`, or the user's own.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import shapes
from benchmarks.peers.workloads import VOCABULARY
from octavo.common.models import demo as demo_model
from octavo.engine.models.resolve_or_convert import resolve

DIRECTORY = "directory"
"""Directory with bf16 safetensors and tokenizer, for `from_pretrained`."""
GGUF = "GGUF"
"""The 4-bit file."""
DEMO = "demo"


@dataclass(frozen=True, slots=True)
class Model:
    """A model for the peers.

    Attributes:
        name: Name on the command line; the last part of a directory.
        title: Name in the report.
        vocabulary: Number of its tokens.
        makers: Functions by format that return the model's path, given the folder for files.
    """

    name: str
    title: str
    vocabulary: int
    makers: dict[str, Callable[[Path], Path]]

    @property
    def forms(self) -> frozenset[str]:
        """The formats that it has."""
        return frozenset(self.makers)

    def provide(self, form: str, folder: Path) -> Path:
        """Return the model's path; prepare the model if it is missing.

        Args:
            form: DIRECTORY or GGUF.
            folder: Folder of all files.

        Raises:
            ModelError: The demo model's package could not be fetched.
        """
        return self.makers[form](folder)


def choose(name: str) -> Model:
    """Return the model of a name from `shapes`, of "demo", or of a directory.

    Raises:
        ValueError: There is no such model.
    """
    if name == DEMO:
        title = "SmolLM2-135M-Instruct; all weights are made from the same 4-bit file"
        makers = {DIRECTORY: lambda _: Path(resolve(DEMO)), GGUF: lambda _: demo_model.file()}
        return Model(name, title, VOCABULARY, makers)
    if name in shapes.SHAPES:
        shape = shapes.SHAPES[name]
        title = f"{shape.title}, with random weights and the demo model's vocabulary"
        makers = {DIRECTORY: lambda folder: shapes.provide(name, folder)}
        return Model(name, title, VOCABULARY, makers)
    directory = Path(name).expanduser().resolve()
    if not (directory / "config.json").is_file():
        known = ", ".join([DEMO, *shapes.SHAPES])
        raise ValueError(f"no model is called {name!r} ({known}), and no directory has one")
    return Model(
        directory.name, directory.name, _count_tokens(directory), {DIRECTORY: lambda _: directory}
    )


def _count_tokens(directory: Path) -> int:
    """Return the vocabulary size in a model's config."""
    config = json.loads((directory / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])
