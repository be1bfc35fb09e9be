"""Checks a directory for tokenizer files, without the seconds of loading."""

import json
from pathlib import Path

from octavo.common.models.errors import ModelError
from octavo.common.models.git_lfs import check_no_pointer
from octavo.common.models.json_files import read_json

TOKENIZER_JSON = "tokenizer.json"
FILES = (
    *("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", "*.spm", "encoder.json"),
    *("tekken.json", "added_tokens.json", "special_tokens_map.json", "chat_template*"),
)
"""Names of a tokenizer's files, except its Python code."""
VOCABULARIES = (
    *(TOKENIZER_JSON, "*.model", "*.tiktoken", "*.spm", "vocab.*", "*-vocab.json"),
    *("encoder.json", "tekken.json"),
)
"""Names of files with a vocabulary; a tokenizer has at least one."""
OBJECTS = (TOKENIZER_JSON, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Names of files that contain a JSON object."""
WITHOUT_VOCABULARY = {"ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer"}
"""Tokenizer classes whose tokens are bytes or characters."""


def check_tokenizer_files(directory: Path, *, unparsed: str = "") -> None:
    """Reject a directory without tokenizer files, or with damaged ones or Git LFS pointers.

    Args:
        directory: The model's directory.
        unparsed: The name of a file that the caller parses itself.

    Raises:
        ModelError: The directory is rejected; the message says what is there.
        OSError: A file cannot be read.
    """
    for file in tokenizer_files(directory):
        check_no_pointer(file)
    for name in OBJECTS:
        if name != unparsed and (directory / name).is_file():
            read_json(directory / name)
    held = {file.name for pattern in VOCABULARIES for file in directory.glob(pattern)}
    if held == {"vocab.json"} and not (directory / "merges.txt").is_file():
        raise ModelError(f"{directory} has an incomplete tokenizer: vocab.json without merges.txt")
    if held:
        return
    if _class(directory) not in WITHOUT_VOCABULARY:
        names = ", ".join(file.name for file in tokenizer_files(directory))
        raise ModelError(
            f"{directory} has no tokenizer: no tokenizer.json, tokenizer.model or vocab file"
            + (f", only {names}" if names else "")
        )


def tokenizer_files(directory: Path) -> list[Path]:
    """Return the files of a directory's tokenizer, by name."""
    files = {file for pattern in FILES for file in directory.glob(pattern)}
    return sorted(file for file in files if file.is_file())


def _class(directory: Path) -> str | None:
    """Return the name of the tokenizer's class, if the files contain it."""
    try:
        config = json.loads((directory / "tokenizer_config.json").read_bytes())
        name = config.get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return None
    return name if isinstance(name, str) else None
