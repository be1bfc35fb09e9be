"""Downloads models and tokenizers from the Hugging Face hub, with clear error messages."""

import errno
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from octavo.common.models.checkpoint import CONFIG_FILES, check_config
from octavo.common.models.errors import ModelError, first_line
from octavo.common.models.hub_weights import fetch_weights, partial_size
from octavo.common.models.image_families import PROCESSOR_FILES
from octavo.common.models.json_files import CONFIG
from octavo.common.models.safetensors_files import INDEX, WHOLE, names_in_index, no_weights
from octavo.common.models.tokenizer_files import FILES as TOKENIZER_FILES

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

LOOK_UP_SECONDS = 10.0
"""Timeout in seconds of the first request to the hub."""
SMALL_FILES = ("*.json", "*.jinja", *TOKENIZER_FILES)
"""File patterns of a model's files other than weights."""
GB = 1e9
FORBIDDEN = (401, 403)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

log = structlog.get_logger(__name__)


class _HubUnreachableError(Exception):
    """The hub cannot be reached; the message says why."""


def split_revision(name: str) -> tuple[str, str | None]:
    """Split a model's name into the name on the hub, and the revision after @."""
    repository, _, revision = name.partition("@")
    return repository, revision or None


def fetch_model(name: str) -> Path:
    """Return the directory of a hub model; download missing files first.

    Small files are downloaded first, to reject models that cannot be served before downloading
    weights.

    Raises:
        ModelError: The model is unavailable, or Octavo cannot serve it; the message says what to
            do.
    """
    info = look_up(name)
    if isinstance(info, Path):
        return info
    directory = _fetch_checked(name, info, SMALL_FILES)
    return download(name, info, [*_matching(info, SMALL_FILES), *_weights(name, info, directory)])


def fetch_config(name: str) -> Path:
    """Return the directory of a hub model, perhaps with configs only.

    Raises:
        ModelError: `fetch_model` would reject these files or the weights' names.
    """
    info = look_up(name)
    if isinstance(info, Path):
        return info
    directory = _fetch_checked(name, info, CONFIG_FILES)
    _check_weights(name, info)
    return directory


def _fetch_checked(name: str, info: "ModelInfo", patterns: Iterable[str]) -> Path:
    """Download a model's small files by name, and check its config.

    Raises:
        ModelError: The files are unavailable, or Octavo cannot serve the model.
    """
    directory = download(name, info, _matching(info, patterns))
    if not (directory / CONFIG).is_file():
        why = no_weights(_names(info))
        raise ModelError(f"the model {name!r} of the hub has no {CONFIG} and {why}")
    check_config(directory, embeds=True)  # its settings are not known here
    return directory


def fetch_tokenizer(name: str) -> Path:
    """Return the directory of a hub tokenizer; download missing files first.

    Raises:
        ModelError: The tokenizer is unavailable; the message says what to do.
    """
    info = look_up(name)
    if isinstance(info, Path):
        return info
    return download(name, info, _matching(info, (CONFIG, *PROCESSOR_FILES, *TOKENIZER_FILES)))


def look_up(name: str) -> "ModelInfo | Path":
    """Return the hub's information on a model, or its cached directory if the hub is unreachable.

    Raises:
        ModelError: The hub is unreachable or refuses, and the model is not cached.
    """
    try:
        return _ask(name)
    except ModelError as error:
        refusal, why = error, "the hub refuses the model"
    except _HubUnreachableError as error:
        refusal, why = _unreachable(name, str(error)), str(error)
    if (cached := _cached(name)) is None:
        raise refusal from None
    log.warning("using the model's cached files", model=name, reason=why)
    return cached


def _ask(name: str) -> "ModelInfo":
    """Request a model's information from the hub.

    Raises:
        ModelError: The model does not exist, or access is denied.
        _HubUnreachableError: The hub is unreachable, or its answer is invalid.
    """
    from huggingface_hub import HfApi, errors  # noqa: PLC0415 - slow to import

    try:
        repository, revision = split_revision(name)
        return HfApi().model_info(
            repository, revision=revision, timeout=LOOK_UP_SECONDS, files_metadata=True
        )
    except errors.HfHubHTTPError as error:
        why = f"HTTP status {error.response.status_code}"
        raise _refusal(name, error) or _HubUnreachableError(why) from error
    except errors.OfflineModeIsEnabled as error:
        raise _HubUnreachableError("HF_HUB_OFFLINE is set") from error
    except Exception as error:  # the HTTP library's errors, or an answer that is not the hub's
        raise _HubUnreachableError(first_line(error)) from error


def _refusal(name: str, error: BaseException | None) -> ModelError | None:
    """Return the message of a hub's refusal; None for any other error."""
    from huggingface_hub import errors  # noqa: PLC0415

    hub = f"the hub ({_endpoint()})"
    match error:
        case errors.RevisionNotFoundError():
            return ModelError(
                f"{hub} has no such revision of the model: {name!r}; --revision is a branch, a tag"
                " or a commit"
            )
        case errors.GatedRepoError():
            return ModelError(
                f"the model {name!r} of {hub} is gated: request access on its page, and set"
                " HF_TOKEN to a token of your account"
            )
        case errors.RepositoryNotFoundError():
            return ModelError(
                f"{hub} has no model {name!r}, or it is private; it is not a local directory either"
                f" ({Path(name).absolute()}): correct the name, or set HF_TOKEN to a token that may"
                " read it"
            )
        case errors.HfHubHTTPError() if error.response.status_code in FORBIDDEN:
            status = error.response.status_code
            return ModelError(
                f"{hub} refuses the model {name!r} (HTTP status {status}): set HF_TOKEN to a token"
                " that may read it"
            )
    return None


def _unreachable(name: str, why: str) -> ModelError:
    from huggingface_hub import constants  # noqa: PLC0415

    return ModelError(
        f"{name!r} is not a local directory ({Path(name).absolute()}), is not in the cache"
        f" ({constants.HF_HUB_CACHE}), and the hub ({_endpoint()}) cannot be reached ({why}): pass "
        "a local directory or GGUF file; or set HTTPS_PROXY if the network needs a proxy, or"
        " HF_ENDPOINT for a mirror; or copy a filled cache here and set HF_HUB_OFFLINE=1"
    )


def _cached(name: str) -> Path | None:
    """Return the model's directory in the cache, if it is there."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    try:
        repository, revision = split_revision(name)
        directory = snapshot_download(
            repository, revision=revision, local_files_only=True, allow_patterns=[CONFIG]
        )
    except (OSError, ValueError):
        return None
    return Path(directory)


def _names(info: "ModelInfo") -> list[str]:
    """Return the files at the top level of a repository; folders hold other formats."""
    names = [file.rfilename for file in info.siblings or ()]
    return [name for name in names if "/" not in name]


def _matching(info: "ModelInfo", patterns: Iterable[str]) -> list[str]:
    return [n for n in _names(info) if any(fnmatchcase(n, pattern) for pattern in patterns)]


def _weights(name: str, info: "ModelInfo", directory: Path) -> list[str]:
    """Return the names of the weight files.

    Raises:
        ModelError: There are no weight files that can be served.
    """
    _check_weights(name, info)
    return [WHOLE] if WHOLE in _names(info) else names_in_index(directory / INDEX)


def _check_weights(name: str, info: "ModelInfo") -> None:
    """Reject a model if its file names show no weights that Octavo can serve."""
    names = _names(info)
    if WHOLE not in names and INDEX not in names:
        raise ModelError(f"the model {name!r} of the hub {no_weights(names)}")


def download(name: str, info: "ModelInfo", files: list[str]) -> Path:
    """Return the cache directory of a model, containing these files.

    Raises:
        ModelError: The files are unavailable, or the disk has no room for them.
    """
    from huggingface_hub import constants, snapshot_download  # noqa: PLC0415

    _check_room(name, info, files, Path(constants.HF_HUB_CACHE))
    with _as_model_error(name, constants.HF_HUB_CACHE):
        repository, revision = split_revision(name)
        fetch_weights(repository, info, files)
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=files, max_workers=4)
        )


@contextmanager
def _as_model_error(name: str, cache: str) -> Iterator[None]:
    """Convert download errors to ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise ModelError(_no_room(name, cache, "the disk is full")) from error
        refusal = _refusal(name, error) or _refusal(name, error.__cause__)
        raise refusal or ModelError(_interrupted(name, error)) from error


def _interrupted(name: str, error: Exception) -> str:
    return (
        f"the model {name!r} cannot be downloaded from the hub ({_endpoint()}):"
        f" {first_line(error)}. Start again: what was downloaded is kept"
    )


def _check_room(name: str, info: "ModelInfo", files: list[str], cache: Path) -> None:
    """Reject a download that is larger than the free space.

    Raises:
        ModelError: The download is too large; the message has both sizes.
    """
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    repository, _ = split_revision(name)
    missing = [
        file
        for file in info.siblings or ()
        if file.rfilename in files
        and not isinstance(
            try_to_load_from_cache(repository, file.rfilename, revision=info.sha), str
        )
    ]
    needed = sum((file.size or 0) - partial_size(repository, file) for file in missing)
    free = _free(cache)
    if needed > free:
        sizes_text = f"{needed / GB:.1f} GB are needed, and {free / GB:.1f} GB are free"
        raise ModelError(_no_room(name, str(cache), sizes_text))


def _free(directory: Path) -> int:
    """Return the free bytes on the disk of a directory, which may not exist yet."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(there).free


def _no_room(name: str, cache: str, why: str) -> str:
    return (
        f"the model {name!r} cannot be stored in {cache}: {why}. Free some space, or set HF_HOME to"
        " a directory on a larger disk"
    )


def _endpoint() -> str:
    """Return the hub's address."""
    from huggingface_hub import constants  # noqa: PLC0415

    return constants.ENDPOINT
