"""The table of docs/models.md: every causal language model of transformers, served or why not."""

import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from octavo.common.models.errors import ModelError
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.model_report import group_reports, load_checked
from tests.architectures.entries import VARIANTS, Entry, entries
from tests.architectures.tiny import CONTEXT, tiny_config
from tools.generated_part import MadePart

PLACE = MadePart(Path("docs/models.md"), "models", target="docs")
KINDS = {
    "attention": "attention",
    "latent": "latent",
    "window": "windows",
    "chunk": "chunks",
    "state": "states",
}
BEGINNINGS = ("{} cannot be served: ", "transformers cannot load {}: ", "{} ")
"""How refusals begin, with the model's directory."""


def families() -> Iterator[Entry]:
    """Return an entry for each type of model."""
    return (entry for entry in entries() if entry not in VARIANTS)


def row(entry: Entry) -> str:
    """Return the row of a type of model, as its tiny model is judged."""
    kept, refusal = judge(entry)
    return f"| `{entry.model_type}` | {'no' if refusal else 'yes'} | {refusal or kept} |"


def judge(entry: Entry) -> tuple[str, str]:
    """Return the kinds of layer groups of a tiny model, or why it is not served."""
    with tempfile.TemporaryDirectory() as directory:
        tiny_config(entry.model_type, entry.overrides).save_pretrained(directory)
        settings = EngineSettings.load(model=directory, device="cpu", dtype="float32")
        try:
            empty = load_checked(settings, Path(directory))
        except ModelError as error:
            return "", _reason(str(error), directory)
    layout = plan_layout(empty.shape, settings.block_size, empty.dtype, empty.cache_dtype)
    groups = group_reports(layout, layout.block_elements, CONTEXT, CONTEXT)
    return ", ".join(dict.fromkeys(KINDS[group.kind] for group in groups)), ""


def _reason(refusal: str, directory: str) -> str:
    """Return why a model is not served, without its name."""
    for beginning in BEGINNINGS:
        refusal = refusal.removeprefix(beginning.format(directory))
    return refusal.rstrip(":").replace("|", "\\|")


def markdown() -> str:
    """Return the table, and what it counts."""
    rows = [row(entry) for entry in families()]
    served = sum("| yes |" in line for line in rows)
    count = (
        f"Of the {len(rows)} types of causal language models in transformers"
        f" {version('transformers')}, {served} are served:"
    )
    head = [count, "", "| `model_type` | served | its cache, or why not |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows])


if __name__ == "__main__":
    PLACE.renew(markdown())
