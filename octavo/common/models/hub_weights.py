"""Downloads large files of the hub, goes on where a download was interrupted, and checks them.

The hub's own library begins an interrupted file again, and checks only its size.
"""

import hashlib
from collections.abc import Container
from functools import partial
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.common.models.errors import ModelError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

FILES_AT_ONCE = 4


def fetch_weights(repository: str, info: "ModelInfo", names: Container[str]) -> None:
    """Add the large ones of a model's files to the hub's cache.

    Another process that downloads the same file is waited for.

    Args:
        repository: The model's name on the hub.
        info: The hub's information on the revision.
        names: The files.

    Raises:
        ModelError: A file's digest is not the hub's; the file is not kept.
    """
    from huggingface_hub import constants  # noqa: PLC0415 - slow to import, like the next
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined] # noqa: PLC0415
    from tqdm.contrib.concurrent import thread_map  # type: ignore[import-untyped] # noqa: PLC0415

    missing = [
        file
        for file in info.siblings or ()
        if file.rfilename in names
        and file.lfs is not None
        and file.lfs.size <= constants.MAX_HTTP_DOWNLOAD_SIZE  # the library has others, and checks
        and not _link(repository, info, file).exists()
    ]
    fetch = partial(_fetch, repository, info)
    if len(missing) == 1:
        fetch(missing[0])
    elif missing:
        desc = f"Fetching {len(missing)} files"
        thread_map(fetch, missing, max_workers=FILES_AT_ONCE, desc=desc, tqdm_class=tqdm)


def partial_size(repository: str, file: "RepoSibling") -> int:
    """Return the bytes of a file that an interrupted download has left in the cache."""
    path = None if file.lfs is None else _partial(_blob(repository, file.lfs.sha256))
    return path.stat().st_size if path is not None and path.exists() else 0


def _fetch(repository: str, info: "ModelInfo", file: "RepoSibling") -> None:
    """Download a file to the cache, unless its content is there already.

    Raises:
        ModelError: Its digest is not the hub's.
    """
    from filelock import FileLock  # noqa: PLC0415 - of an extra

    assert file.lfs is not None
    blob, link = _blob(repository, file.lfs.sha256), _link(repository, info, file)
    lock = blob.parents[2] / ".locks" / blob.parents[1].name / f"{blob.name}.lock"  # the library's
    for directory in (lock.parent, blob.parent, link.parent):
        directory.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        if not blob.exists():
            _download(repository, info, file, _partial(blob))
            _partial(blob).rename(blob)
        if not link.exists():
            link.unlink(missing_ok=True)  # its target was removed
            link.symlink_to(relpath(blob, link.parent))


def _download(repository: str, info: "ModelInfo", file: "RepoSibling", path: Path) -> None:
    """Write a file, or the rest of it, to a path.

    Raises:
        ModelError: Its digest is not the hub's.
    """
    from huggingface_hub import hf_hub_url  # noqa: PLC0415
    from huggingface_hub.file_download import http_get  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # noqa: PLC0415

    assert file.lfs is not None
    with path.open("ab+") as content:
        if content.tell() > file.lfs.size:  # of a file that was damaged
            content.truncate(0)
        http_get(
            hf_hub_url(repository, file.rfilename, revision=info.sha),
            content,
            resume_size=content.tell(),
            headers=build_hf_headers(),
            expected_size=file.lfs.size,
            displayed_filename=file.rfilename,
        )
        content.seek(0)
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != file.lfs.sha256:
        path.unlink()
        raise ModelError(
            f"the file {file.rfilename!r} of the model {repository!r} was damaged on its way: its"
            f" SHA-256 is {digest}, the hub's is {file.lfs.sha256}. It is not kept; start again"
        )


def _blob(repository: str, digest: str) -> Path:
    """Return the path of a file's content in the cache."""
    from huggingface_hub import constants  # noqa: PLC0415
    from huggingface_hub.file_download import repo_folder_name  # noqa: PLC0415

    folder = repo_folder_name(repo_id=repository, repo_type="model")
    return Path(constants.HF_HUB_CACHE, folder, "blobs", digest)


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _link(repository: str, info: "ModelInfo", file: "RepoSibling") -> Path:
    """Return the path of a file in the cached revision, a link to its content."""
    return _blob(repository, "").parent / "snapshots" / str(info.sha) / file.rfilename
