"""Split the work of a batch among Triton programs. Runs on the host, once per step."""

import numpy as np
import torch

from octavo.kernels.gpu import describe_gpu
from octavo.kernels.host import to_device
from octavo.kernels.metadata import AttentionMetadata, AttentionPlan
from octavo.kernels.triton.tiles import Heads, choose_tiles


def plan_attention(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    *,
    num_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    latent: bool = False,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
    splits: int | None = None,
) -> AttentionPlan:
    """Return a batch's plan; see `octavo.kernels.ops.plan_attention`."""
    heads = Heads(num_heads // num_kv_heads, key_dim, value_dim, latent)
    return _plan(query_lens, seq_lens, heads, dtype, cache_dtype, device, splits)


def _plan(  # noqa: PLR0917
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    heads: Heads,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
    splits: int | None,
) -> AttentionPlan:
    gpu, group = describe_gpu(device), heads.group
    decode_rows, chunk_rows = (
        choose_tiles(kind, gpu, heads, dtype=dtype, cache_dtype=cache_dtype).rows
        for kind in ("decode", "chunk")
    )
    decodes, chunks = np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)
    items = np.concatenate(
        [
            _tiles_of(decodes, query_lens[decodes] * group, decode_rows),
            _tiles_of(chunks, query_lens[chunks] * group, chunk_rows),
        ]
    )
    return AttentionPlan(
        items=to_device(items, device),
        num_decode_items=len(decodes) * -(-group // decode_rows),
        longest_decode=int(seq_lens[decodes].max(initial=0)),
        longest_chunk=int(seq_lens[chunks].max(initial=0)),
        splits=splits,
    )


def _tiles_of(seqs: np.ndarray, rows: np.ndarray, tile_rows: int) -> np.ndarray:
    """Return `[num_tiles, 2]` int32 of (sequence, tile), each sequence's last (longest) first."""
    counts = -(-rows // tile_rows)
    ends = np.cumsum(counts)
    tile = np.repeat(ends, counts) - 1 - np.arange(ends[-1] if len(ends) else 0)
    return np.stack([np.repeat(seqs, counts), tile], 1).astype(np.int32)


def plan_of(
    metadata: AttentionMetadata, query: torch.Tensor, key_cache: torch.Tensor, heads: Heads
) -> AttentionPlan:
    """Return the batch's plan; if it has none, make one, for which the host waits for the GPU."""
    if metadata.plan is not None:
        return metadata.plan
    return _plan(
        metadata.query_starts.diff().cpu().numpy(),
        metadata.seq_lens.cpu().numpy(),
        heads,
        query.dtype,
        key_cache.dtype,
        query.device,
        None,
    )
