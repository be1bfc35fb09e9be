"""Early checks, before slow imports and model loading: ports, files, models and the cache.

The servers check them again when they use them.
"""

from collections.abc import Iterable
from pathlib import Path

from octavo.common.models import cache
from octavo.common.models.checkpoint import check_checkpoint
from octavo.common.models.errors import ModelError
from octavo.common.models.gguf import reader as gguf
from octavo.common.models.resolve import gguf_file, resolve_checkpoint, resolve_tokenizer
from octavo.common.models.tokenizer_files import check_tokenizer_files
from octavo.common.ports import Listener, check_all
from octavo.engine.settings import EngineSettings
from octavo.router.settings import RouterSettings
from octavo.router.tenants.tenant import read_tenants


def check_router(settings: RouterSettings, others: Iterable[Listener] = ()) -> None:
    """Check the ports and files that a router will use.

    Args:
        settings: The router's settings.
        others: Other addresses on which this process and its children will listen.

    Raises:
        OSError: A port is in use.
        TlsError: A certificate or key cannot be used.
        SettingsError: The tenants' file cannot be used.
    """
    check_all([*settings.listeners, *others])
    for tls in (settings.tls, settings.engine_tls):
        if tls is not None:
            tls.read()
    if settings.tenants is not None:
        read_tenants(settings.tenants, settings.workers)


def check_engine(settings: EngineSettings) -> None:
    """Check the ports and files that an engine will use.

    Raises:
        OSError: A port is in use, or the cache is not writable.
        TlsError: A certificate or key cannot be used.
    """
    check_all(settings.listeners)
    if settings.tls is not None:
        settings.tls.read()
    cache.check_usable()


def check_model(settings: EngineSettings) -> Path:
    """Check the small files of an engine's model; return its directory or GGUF file.

    A hub model is downloaded. The engine reads a GGUF file later, as that needs PyTorch.

    Raises:
        ModelError: The model does not exist, or cannot be served.
        OSError: A file cannot be opened.
    """
    if (file := gguf_file(settings.source)) is not None:
        gguf.check(file)
        return file
    directory = Path(resolve_checkpoint(settings.source))
    check_checkpoint(directory, embeds=settings.pooling is not None)
    return directory


def check_tokenizer(source: str) -> None:
    """Check the tokenizer at `source`, the value of --tokenizer or --model.

    A GGUF file's tokenizer is created later.

    Raises:
        ModelError: There is no tokenizer, or its files are incomplete.
        OSError: A file cannot be opened.
    """
    if (file := gguf_file(source)) is not None:
        gguf.check(file)
        return
    try:
        check_tokenizer_files(Path(resolve_tokenizer(source)))
    except ModelError as error:
        raise ModelError(
            f"the tokenizer {source!r} cannot be loaded: {error}; or name another tokenizer with"
            " --tokenizer"
        ) from error
