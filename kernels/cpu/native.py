"""The compiled kernels on CPU: tensors in, pointers and strides through to C++."""

from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kernels.cpu.build import load_library
from kernels.metadata import AttentionMetadata

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Attention(Structure):
    """What `octavo_paged_attention` takes; mirrors its struct of that name."""

    _fields_ = (
        ("query", c_void_p),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("out", c_void_p),
        ("query_starts", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("alibi_slopes", c_void_p),
        ("query_token_stride", c_int64),
        ("query_head_stride", c_int64),
        ("block_stride", c_int64),
        ("table_stride", c_int64),
        ("table_width", c_int32),
        ("num_seqs", c_int32),
        ("num_blocks", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("sliding_window", c_int32),
        ("threads", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


class NativeKernels:
    """The kernels of `kernels.ops`, in C++.

    Raises:
        OSError: they cannot be compiled here.
    """

    def __init__(self) -> None:
        library = load_library()
        self._attend = library.octavo_paged_attention
        self._attend.argtypes = (POINTER(_Attention), c_int)
        self._attend.restype = c_int
        self._write = library.octavo_write_kv
        self._write.argtypes = (
            *(c_void_p, c_int64, c_int64) * 2,
            *(c_void_p, c_void_p, c_int64, c_int64, c_int64),
            *(c_void_p, c_int64, c_int64, c_int64),
        )
        self._write.restype = c_int64
        self._copy = library.octavo_copy_blocks
        self._copy.argtypes = (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int)
        self._copy.restype = None

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Writes each token's key and value to its slot; see `kernels.ops.write_kv`."""
        num_tokens, num_kv_heads, head_dim = key.shape
        num_blocks, cache_heads, block_size, cache_dim = key_cache.shape
        _check_cache(key_cache, value_cache, key.dtype)
        if (num_kv_heads, head_dim) != (cache_heads, cache_dim) or value.shape != key.shape:
            raise ValueError(
                f"key {list(key.shape)} and value {list(value.shape)} do not fit a cache of "
                f"{cache_heads} heads of {cache_dim}"
            )
        if value.dtype != key.dtype:
            raise ValueError(f"key is {key.dtype} and value is {value.dtype}")
        if slot_mapping.dtype != torch.int64 or slot_mapping.shape != (num_tokens,):
            raise ValueError(f"slot_mapping must be {num_tokens} int64")
        key, value = _rows(key), _rows(value)
        slot_mapping = slot_mapping.contiguous()
        size = key.element_size()
        bad = self._write(
            key.data_ptr(),
            key.stride(0) * size,
            key.stride(1) * size,
            value.data_ptr(),
            value.stride(0) * size,
            value.stride(1) * size,
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            key_cache.stride(0) * size,
            num_blocks,
            block_size,
            slot_mapping.data_ptr(),
            num_tokens,
            num_kv_heads,
            head_dim * size,
        )
        if bad:
            raise IndexError(
                f"token {bad - 1} goes to slot {int(slot_mapping[bad - 1])}, "
                f"of {num_blocks * block_size}"
            )

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """Attends over paged keys and values; see `kernels.ops.paged_attention`."""
        num_tokens, num_heads, head_dim = query.shape
        num_blocks, num_kv_heads, block_size, cache_dim = key_cache.shape
        _check_cache(key_cache, value_cache, query.dtype)
        if head_dim != cache_dim or num_heads % num_kv_heads:
            raise ValueError(
                f"{num_heads} query heads of {head_dim} do not fit a cache of "
                f"{num_kv_heads} heads of {cache_dim}"
            )
        query_starts, seq_lens = metadata.query_starts, metadata.seq_lens
        block_tables = metadata.block_tables
        num_seqs = seq_lens.shape[0]
        for name, tensor in (
            ("query_starts", query_starts),
            ("seq_lens", seq_lens),
            ("block_tables", block_tables),
        ):
            if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
                raise ValueError(f"{name} must be contiguous int32")
        query = _rows(query)
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype)
        if alibi_slopes is not None:
            alibi_slopes = alibi_slopes.to(torch.float32).contiguous()
        bad = self._attend(
            byref(
                _Attention(
                    query.data_ptr(),
                    key_cache.data_ptr(),
                    value_cache.data_ptr(),
                    out.data_ptr(),
                    query_starts.data_ptr(),
                    seq_lens.data_ptr(),
                    block_tables.data_ptr(),
                    alibi_slopes.data_ptr() if alibi_slopes is not None else None,
                    query.stride(0),
                    query.stride(1),
                    key_cache.stride(0),
                    block_tables.stride(0),
                    block_tables.shape[1],
                    num_seqs,
                    num_blocks,
                    num_heads,
                    num_kv_heads,
                    head_dim,
                    block_size,
                    sliding_window or 0,
                    torch.get_num_threads(),
                    scale,
                    soft_cap or 0.0,
                )
            ),
            _DTYPES[query.dtype],
        )
        if bad:
            raise IndexError(
                f"the block table of sequence {bad - 1}, {int(seq_lens[bad - 1])} tokens long, "
                f"does not hold enough blocks out of {num_blocks}: "
                f"{block_tables[bad - 1].tolist()}"
            )
        return out

    def copy_blocks(self, cache: Tensor, pairs: Tensor) -> None:
        """Copies whole blocks within a cache; see `kernels.ops.copy_blocks`."""
        self.swap_blocks(cache, cache, pairs)

    def swap_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        """Copies whole blocks between caches in CPU memory; see `kernels.ops.swap_blocks`."""
        if source.shape[1:] != destination.shape[1:] or source.dtype != destination.dtype:
            raise ValueError(
                f"blocks of {list(source.shape[1:])} {source.dtype} cannot be copied to blocks "
                f"of {list(destination.shape[1:])} {destination.dtype}"
            )
        if not (source.is_contiguous() and destination.is_contiguous()):
            raise ValueError("caches must be contiguous")
        pairs = pairs.to(torch.int64).contiguous()
        self._copy(
            source.data_ptr(),
            destination.data_ptr(),
            pairs.data_ptr(),
            pairs.shape[0],
            source.stride(0) * source.element_size(),
            torch.get_num_threads(),
        )


def _rows(tensor: Tensor) -> Tensor:
    """Returns a tensor whose last dimension is contiguous: itself, or a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check_cache(key_cache: Tensor, value_cache: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError if C++ would read the caches' memory wrongly."""
    if key_cache.dtype != dtype or value_cache.dtype != dtype or dtype not in _DTYPES:
        raise ValueError(
            f"tokens are {dtype}, keys {key_cache.dtype} and values {value_cache.dtype}: "
            f"they must be one of {', '.join(str(known) for known in _DTYPES)}, the same"
        )
    _, _, block_size, head_dim = key_cache.shape
    inner = (block_size * head_dim, head_dim, 1)
    if key_cache.stride()[1:] != inner or value_cache.stride() != key_cache.stride():
        raise ValueError(
            f"a block must be contiguous: strides are {key_cache.stride()} of keys "
            f"and {value_cache.stride()} of values"
        )


__all__ = ["NativeKernels"]
