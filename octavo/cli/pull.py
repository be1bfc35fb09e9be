"""`octavo pull`: download models before they are served."""

from typing import Annotated

import typer

from octavo.cli.extras import require
from octavo.cli.output import fail, out
from octavo.common.models.errors import ModelError
from octavo.common.models.resolve import gguf_file, resolve_checkpoint


def pull(
    models: Annotated[
        list[str],
        typer.Argument(
            help="OWNER/NAME, OWNER/NAME@REVISION, or OWNER/NAME:TYPE for a GGUF file, such as"
            " OWNER/NAME:Q4_K_M."
        ),
    ],
) -> None:
    """Download models into Hugging Face's cache, or complete downloads; print their paths.

    `hf cache ls`, `hf cache verify` and `hf cache rm` list, check and remove what is there.
    """
    require("pull", "router")
    try:
        for model in models:
            out.out(str(gguf_file(model) or resolve_checkpoint(model)))
    except (ModelError, OSError) as error:
        raise fail(str(error)) from None
