"""Finds a model's files, and checks that none is missing."""

from pathlib import Path

import structlog

from octavo.common.models.checkpoint import check_checkpoint
from octavo.common.models.errors import ModelError
from octavo.common.models.json_files import CONFIG, read_json
from octavo.common.models.rope_context import first_context
from octavo.common.models.tokenizer_files import check_tokenizer_files
from octavo.engine.memory.freed import mapping_large
from octavo.engine.models.resolve_or_convert import resolve
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.capacity import keeps_blocks

log = structlog.get_logger(__name__)


def find_model(settings: EngineSettings) -> tuple[Path, bool]:
    """Return the directory of the engine's model, and whether it has a tokenizer.

    The headers of its files are checked.

    Raises:
        ModelError: The files cannot be read.
        OSError: There is no such model.
    """
    with mapping_large():
        path = Path(resolve(settings.source, packed=keeps_blocks(settings)))
    check_checkpoint(path, embeds=settings.pooling is not None)
    _warn_of_rope(settings, path)
    return path, _has_tokenizer(path)


def _warn_of_rope(settings: EngineSettings, model: Path) -> None:
    """Warn that short texts get different logits if `--max-model-len` needs a stretched context.

    Cached keys cannot change their frequencies, so all lengths use the same ones.
    """
    first = first_context(read_json(model / CONFIG))
    if first is not None and (settings.max_model_len or 0) > first:
        log.warning(
            "all lengths have the rotary frequencies of long ones, which transformers has beyond"
            " the original context alone",
            original_context=first,
            max_model_len=settings.max_model_len,
            hint=f"set --max-model-len to {first} or less for its logits of short texts",
        )


def _has_tokenizer(model: Path) -> bool:
    """Return whether the model has a tokenizer: routers need one, and so do constraints."""
    try:
        check_tokenizer_files(model)
    except ModelError as error:
        log.warning(
            "routers need --tokenizer to use this engine, and outputs cannot be constrained",
            reason=str(error),
        )
        return False
    return True
