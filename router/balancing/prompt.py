"""A prompt as prefix caches see it: the keys of its blocks."""

from collections.abc import Sequence

from octavo.common.kv_cache.prefix_hash import prefix_salt, reusable_keys, short_key


class Prompt:
    """A prompt's tokens, and, once asked for, the keys of its full blocks.

    Args:
        token_ids: The tokens.
        salt: Text that separates its blocks in caches from others of the same tokens.
        adapter: Digest of the request's adapter, by which they know them too.
    """

    __slots__ = ("_adapter", "_keys", "salt", "token_ids")

    def __init__(self, token_ids: Sequence[int], salt: str = "", adapter: str = "") -> None:
        self.token_ids = token_ids
        self.salt = salt
        self._adapter = adapter
        self._keys: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def keys(self, block_size: int) -> list[int]:
        """Return the keys, as engines publish them, of the blocks that a cache can have."""
        if block_size not in self._keys:
            salt = prefix_salt(self.salt, self._adapter)
            keys = reusable_keys(self.token_ids, block_size, salt)
            self._keys[block_size] = [short_key(key) for key in keys]
        return self._keys[block_size]
