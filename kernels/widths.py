"""The widths of keys and values, which may differ."""

from torch import Tensor

from octavo.kernels.whole_numbers import dim_of


def width_of_values(key_cache: Tensor, value_cache: Tensor | None, value_dim: int | None) -> int:
    """Return the elements of a value.

    Args:
        key_cache: `[num_blocks, num_kv_heads, block_size, key_dim]`.
        value_cache: `[num_blocks, num_kv_heads, block_size, value_dim]`; None if a key's first
            elements are its value.
        value_dim: Number of a key's elements that are its value; None if there is a value cache.

    Raises:
        ValueError: `value_dim` does not fit the caches.
    """
    if value_cache is not None:
        width = dim_of(value_cache)
        if value_dim not in {None, width}:
            raise ValueError(f"value_dim is {value_dim} and values have {width} elements")
        return width
    key_dim = dim_of(key_cache)
    if value_dim is None or not 0 < value_dim <= key_dim or value_dim % 8:
        raise ValueError(
            f"value_dim is {value_dim}: without a value cache it must be a multiple of 8, at most"
            f" the {key_dim} elements of a key"
        )
    return value_dim
