"""The files of the model's tokenizer as a zip archive, for gateways on other machines."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from octavo.common import rpc
from octavo.common.models.checkpoint import GENERATION_CONFIG
from octavo.common.models.json_files import CONFIG
from octavo.common.models.tokenizer_files import tokenizer_files

CHUNK_BYTES = 64 << 10


def tokenizer_archive(directory: Path) -> bytes:
    """Return the archive; equal files make equal bytes.

    Args:
        directory: The model's.

    Raises:
        RpcError: FAILED_PRECONDITION: the model has no tokenizer.
        OSError: A file cannot be read.
    """
    files = tokenizer_files(directory)
    if not files:
        raise rpc.precondition("tokenizer", "the engine's model has no tokenizer")
    configs = [directory / name for name in (CONFIG, GENERATION_CONFIG)]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in [*files, *filter(Path.is_file, configs)]:
            archive.writestr(zipfile.ZipInfo(file.name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def in_chunks(archive: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Yield an archive in chunks; the last one has its SHA-256 digest."""
    digest = hashlib.sha256(archive).hexdigest()
    for start in range(0, len(archive), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        yield common_pb2.GetTokenizerChunk(
            data=archive[start:end], sha256=digest if end >= len(archive) else ""
        )
