"""Other libraries' attention on the same tensors, where installed."""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.shapes import BLOCK_SIZE, Batch
from benchmarks.gpu.timing import Timer

BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)
MATH_BYTES = 4 << 30
"""Maximum bytes of plain products; larger ones are skipped."""


def contiguous(batch: Batch) -> Callable[[], torch.Tensor]:
    """Return PyTorch's attention over unpaged K/V of equally long sequences.

    Returns:
        A function that returns `[num_seqs, num_heads, queries, head_dim]`.
    """
    count = len(batch.metadata.seq_lens)
    query, key, value = (
        x.unflatten(0, (count, -1)).transpose(1, 2).contiguous()
        for x in (batch.query, batch.key, batch.value)
    )
    causal = query.shape[2] > 1

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)

    return attend


def time_contiguous(
    batch: Batch, timer: Timer
) -> tuple[dict[str, float], torch.Tensor | None, list[str]]:
    """Time every backend of PyTorch's attention; return seconds, an output and notes."""
    times: dict[str, float] = {}
    notes: list[str] = []
    output = None
    attend = contiguous(batch)
    seqs, tokens = len(batch.metadata.seq_lens), batch.metadata.max_seq_len
    products = seqs * batch.query.shape[1] * batch.metadata.max_query_len * tokens * 4
    for backend in BACKENDS:
        if backend is SDPBackend.MATH and (output is not None or products > MATH_BYTES):
            continue
        name = "sdpa " + backend.name.removesuffix("_ATTENTION").lower()
        try:
            with sdpa_kernel(backend):
                output = attend()
                times[name] = timer.time_recorded(attend)
        except RuntimeError as error:
            notes.append(f"{name}: {str(error).splitlines()[0]}")
    return times, output, notes


def time_paged(batch: Batch, timer: Timer) -> tuple[dict[str, float], list[str]]:
    """Time the paged decodes of other installed libraries."""
    times: dict[str, float] = {}
    notes: list[str] = []
    for name, module, make in (
        ("FlashInfer", "flashinfer", _flashinfer),
        ("FlashAttention", "flash_attn", _flash_attention),
    ):
        if importlib.util.find_spec(module) is None:
            notes.append(f"{name} is not installed")
            continue
        try:
            work, calls = make(batch)
            times[name] = timer.time_recorded(work, calls=calls)
        except Exception as error:  # noqa: BLE001 - whatever fails, the rest runs
            notes.append(f"{name}: {type(error).__name__}: {error}")
    return times, notes


def _flashinfer(batch: Batch) -> tuple[Callable[[], object], int]:
    """Return a function that attends in every layer, and the number of layers."""
    import flashinfer  # type: ignore[import-not-found]  # noqa: PLC0415 - where installed

    counts = (batch.metadata.seq_lens + BLOCK_SIZE - 1) // BLOCK_SIZE
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    starts[1:] = counts.cumsum(0)
    used = torch.arange(batch.metadata.block_tables.shape[1], device=counts.device)
    numbers = batch.metadata.block_tables[used < counts[:, None]]
    space = torch.empty(256 << 20, dtype=torch.uint8, device=counts.device)
    num_heads, num_kv_heads = batch.query.shape[1], batch.key.shape[1]
    # Query heads that share keys are rows of a matrix product, as in our kernel.
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        space, "HND", use_tensor_cores=num_heads > num_kv_heads
    )
    wrapper.plan(
        starts,
        numbers,
        (batch.metadata.seq_lens - 1) % BLOCK_SIZE + 1,
        num_heads,
        num_kv_heads,
        batch.query.shape[2],
        BLOCK_SIZE,
        q_data_type=batch.query.dtype,
        kv_data_type=batch.cache_dtype,
    )

    def attend_all() -> None:
        for caches in batch.caches:
            wrapper.run(batch.query, caches)

    return attend_all, len(batch.caches)


def _flash_attention(batch: Batch) -> tuple[Callable[[], object], int]:
    """Return the function that attends in one layer."""
    from flash_attn import (  # type: ignore[import-not-found]  # noqa: PLC0415 - where installed
        flash_attn_with_kvcache,
    )

    # It needs blocks of 256 tokens: adjacent blocks of ours form one of its blocks.
    per_block = 256 // BLOCK_SIZE
    tokens = len(batch.key) // 256 * 256
    keys, values = (x[:tokens].unflatten(0, (-1, 256)) for x in (batch.key, batch.value))
    count = batch.metadata.block_tables.shape[1] // per_block
    seqs = len(batch.metadata.seq_lens)
    tables = torch.randperm(seqs * count, dtype=torch.int32, device=keys.device).view(seqs, count)
    query = batch.query.unsqueeze(1)
    lens = batch.metadata.seq_lens

    def attend() -> None:
        flash_attn_with_kvcache(
            query, keys, values, cache_seqlens=lens, block_table=tables, causal=True
        )

    return attend, 1
