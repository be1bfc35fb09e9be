"""The images that a router has sent, for the requests that follow."""

import hashlib
from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from octavo.common import rpc
from octavo.common.image_store import ImageStore
from octavo.v1 import engine_pb2

Tensors = Mapping[str, np.ndarray]

STORE_BYTES = 256 << 20
"""Bytes of images that are kept for each session."""
MAX_BYTES = 1 << 30
"""Maximum bytes of an image."""


class SessionImages:
    """Puts images together from their pieces, and keeps the latest."""

    def __init__(self) -> None:
        self._store = ImageStore[Tensors](STORE_BYTES)
        self._pieces = bytearray()
        self._hash = hashlib.sha256()
        self._sent: dict[bytes, Tensors] = {}

    def add(self, piece: engine_pb2.ImagePiece) -> None:
        """Add a piece.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT if the image is not what its digest says.
        """
        if piece.last and not piece.data:
            if (kept := self._store.find(piece.digest)) is not None:
                self._sent[piece.digest] = kept
            return
        if len(self._pieces) + len(piece.data) > MAX_BYTES:
            raise rpc.invalid("image.data", f"image.data may have at most {MAX_BYTES} bytes")
        self._pieces += piece.data
        self._hash.update(piece.data)
        if not piece.last:
            return
        data, digest = bytes(self._pieces), self._hash.digest()
        self._pieces, self._hash = bytearray(), hashlib.sha256()
        if digest != piece.digest:
            raise rpc.invalid("image.digest", "image.digest must be the SHA-256 of its data")
        try:
            tensors = load(data)
        except (SafetensorError, KeyError, ValueError) as error:
            raise rpc.invalid("image.data", f"image.data is no safetensors file: {error}") from None
        self._store.add(digest, len(data), tensors)
        self._sent[digest] = tensors

    def take(self) -> dict[bytes, Tensors]:
        """Return the images that were sent since the last call, by digest."""
        sent, self._sent = self._sent, {}
        return sent
