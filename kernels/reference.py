"""The definition of every kernel; tests compare each fast version with it.

It is simple and slow: float32 arithmetic, one sequence at a time, any shape and any device.
`octavo.kernels.ops` describes the arguments. A CPU for which the C++ kernels cannot be compiled
runs these.
"""

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.activation import Activation
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.sampling_tensors import MIN_TEMPERATURE, SamplingTensors
from octavo.kernels.whole_numbers import pack, unpack
from octavo.kernels.widths import width_of_values


def write_kv(
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write each token's key and value to its slot of the cache; see `ops.write_kv`."""
    for x, cache, scale, keys in (
        (key, key_cache, key_scale, True),
        (value, value_cache, value_scale, False),
    ):
        if x is not None and cache is not None:
            rounded = round_for_cache(x, cache.dtype, scale, keys=keys)
            block_size = cache.shape[2]
            for token, slot in enumerate(slot_mapping.tolist()):
                if slot >= 0:
                    cache[slot // block_size, :, slot % block_size] = rounded[token]


def round_for_cache(x: Tensor, dtype: torch.dtype, scale: float, *, keys: bool) -> Tensor:
    """Return keys or values as a cache of `dtype` stores them."""
    if x.dtype == dtype:
        return x
    if dtype == torch.int8:
        return pack(x, keys=keys)
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def rotate_and_write(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Rotate queries and keys, write keys and values; see `octavo.kernels.ops`."""
    write_kv(
        rotate(key, cos, sin),
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return rotate(query, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads as `rotate_and_write` does.

    Args:
        x: `[num_tokens, heads, key_dim]`.
        cos: See `rotate_and_write`.
        sin: See `rotate_and_write`.

    Returns:
        The heads rotated in float32, with the shape and dtype of `x`.
    """
    half = x.shape[-1] // 2
    low, high = x.float().chunk(2, -1)
    c, s = (angle[:, None, :half].float() for angle in (cos, sin))
    return torch.cat([low * c - high * s, high * c + low * s], -1).to(x.dtype)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Compute causal attention over keys and values in cache blocks.

    This is PagedAttention (Kwon et al., SOSP 2023, section 4.1); see
    `octavo.kernels.ops.paged_attention`. A query that sees no key gives zeros.
    """
    num_tokens, num_heads, _ = query.shape
    group = num_heads // key_cache.shape[1]
    value_dim = width_of_values(key_cache, value_cache, value_dim)
    out = query.new_zeros(num_tokens, num_heads, value_dim)
    starts = metadata.query_starts.tolist()
    for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
        first, last = starts[seq], starts[seq + 1]
        if first == last or seq_len == 0:
            continue
        blocks = metadata.block_tables[seq]
        query_positions = torch.arange(seq_len - (last - first), seq_len, device=query.device)
        first_seen = torch.zeros_like(query_positions)
        if sliding_window is not None:
            first_seen = (query_positions - sliding_window + 1).clamp(min=0)
        elif chunk is not None:
            first_seen = query_positions - query_positions % chunk
        begin = int(first_seen[0])
        # [heads, queries, key_dim] against [heads, keys, key_dim]
        q = query[first:last].float().transpose(0, 1)
        k = key_scale * _gather(key_cache, blocks, begin, seq_len, keys=True).repeat_interleave(
            group, 0
        )
        if value_cache is None:
            v = k[..., :value_dim]
        else:
            v = value_scale * _gather(value_cache, blocks, begin, seq_len, keys=False)
            v = v.repeat_interleave(group, 0)
        logits = scale * q @ k.transpose(1, 2)
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        keys = torch.arange(begin, seq_len, device=query.device)
        distance = keys - query_positions[:, None]
        if alibi_slopes is not None:
            logits = logits + alibi_slopes.float()[:, None, None] * distance
        hidden = (distance > 0) | (keys < first_seen[:, None])
        logits = logits.masked_fill(hidden, -torch.inf)
        if sinks is not None:  # one more key, without a value
            sink = sinks.float()[:, None, None].expand(-1, last - first, 1)
            weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        out[first:last] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out


def latent_attention(
    query: Tensor,
    key_cache: Tensor,
    metadata: AttentionMetadata,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Compute causal attention over keys and values that heads compute from cached latents.

    This is DeepSeek-V2's (2024, section 2.1.2).

    Args:
        query: `[num_tokens, num_heads, key_dim + rotated]`.
        key_cache: `[num_blocks, 1, block_size, latent_dim + rotated]`.
        metadata: See `paged_attention`.
        keys: `[num_heads, key_dim, latent_dim]`: maps latents to the first elements of keys. The
            cache holds the other elements beside the latent; heads share them.
        values: `[num_heads, value_dim, latent_dim]`: maps latents to values.
        scale: See `paged_attention`.
        sliding_window: See `paged_attention`.
        chunk: See `paged_attention`.
        soft_cap: See `paged_attention`.

    Returns:
        `[num_tokens, num_heads, value_dim]`.
    """
    latents = key_cache[..., : keys.shape[2]].float()
    rotated = key_cache[..., keys.shape[2] :].float().expand(-1, len(keys), -1, -1)
    return paged_attention(
        query,
        torch.cat([latents @ keys.float().transpose(1, 2), rotated], -1),
        latents @ values.float().transpose(1, 2),
        metadata,
        scale=scale,
        sliding_window=sliding_window,
        chunk=chunk,
        soft_cap=soft_cap,
    )


def ragged_attention(  # noqa: PLR0917 - an operator's arguments are positional
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    scale: float,
    reach: int,
    causal: bool,
) -> Tensor:
    """Compute attention within each text of a batch without padding.

    Args:
        query: `[num_tokens, num_heads, key_dim]`.
        key: `[num_tokens, num_kv_heads, key_dim]`.
        value: `[num_tokens, num_kv_heads, value_dim]`.
        starts: `[num_texts + 1]` int32, contiguous: the first row of each text, and the end.
        scale: Factor of the dot products.
        reach: Maximum distance of a seen key; negative: all keys of the text are seen.
        causal: Whether a query sees no keys after its own.

    Returns:
        `[num_tokens, num_heads, value_dim]`, contiguous, of the query's dtype.
    """
    group = query.shape[1] // key.shape[1]
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    for first, last in pairwise(starts.tolist()):
        q, k, v = (x[first:last].float().transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        positions = torch.arange(last - first, device=query.device)
        distance = positions - positions[:, None]
        seen = distance <= (0 if causal else len(positions))
        if reach >= 0:
            seen &= distance.abs() <= reach
        logits = (scale * q @ k.transpose(1, 2)).masked_fill(~seen, -math.inf)
        out[first:last] = (logits.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
    return out


def _gather(cache: Tensor, blocks: Tensor, begin: int, end: int, *, keys: bool) -> Tensor:
    """Return a sequence's keys or values `[num_kv_heads, end - begin, dim]` in float32."""
    block_size = cache.shape[2]
    before = begin // block_size
    used = blocks[before : -(-end // block_size)].long()
    kept = slice(begin - before * block_size, end - before * block_size)
    stored = unpack(cache[used], keys=keys) if cache.dtype == torch.int8 else cache[used].float()
    return stored.transpose(0, 1).flatten(1, 2)[:, kept]


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks within a cache; see `octavo.kernels.ops.copy_blocks`."""
    swap_blocks(cache, cache, pairs)


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks from one cache to another; see `octavo.kernels.ops.swap_blocks`."""
    for from_block, to_block in pairs.tolist():
        destination[to_block] = source[from_block]


def experts(  # noqa: PLR0917
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: Activation,
) -> Tensor:
    """Compute a mixture of experts, one row and expert at a time.

    Args:
        x: `[rows, hidden]`.
        expert_ids: `[rows, chosen]` int64; those that do not exist are skipped.
        weights: `[rows, chosen]`.
        up: `[experts, projected, hidden]`; with a gate, the gates and then the up projections.
        up_bias: `[experts, projected]`, or None.
        down: `[experts, hidden, inner]`.
        down_bias: `[experts, hidden]`, or None.
        activation: Maps `[projected]` to `[inner]`.

    Returns:
        `[rows, hidden]`, of the dtype of `x`: the sum of the row's weighted experts.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for row, ids in enumerate(expert_ids.tolist()):
        for choice, expert in enumerate(ids):
            if not 0 <= expert < len(up):
                continue
            projected = up[expert].float() @ x[row].float()
            if up_bias is not None:
                projected = projected + up_bias[expert].float()
            result = down[expert].float() @ activation(projected)
            if down_bias is not None:
                result = result + down_bias[expert].float()
            out[row] += weights[row, choice].float() * result
    return out.to(x.dtype)


def argmax(rows: Tensor) -> Tensor:
    """Return the column of each row's greatest element; see `octavo.kernels.logits.argmax`."""
    return rows.max(dim=-1).indices


def mask_logits(logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> None:
    """Make tokens impossible, in place; see `octavo.kernels.logits.mask_logits`."""
    allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").view(bool)
    width = min(allowed.shape[1], logits.shape[1])
    for row, tokens in zip(rows.tolist(), torch.from_numpy(~allowed[:, :width]), strict=True):
        logits[row, :width].masked_fill_(tokens.to(logits.device), -math.inf)
        logits[row, width:] = -math.inf


def add_low_rank(
    out: Tensor, x: Tensor, adapters: list[int], matrices: list[tuple[Tensor, Tensor, float] | None]
) -> None:
    """Add low-rank products, row by row; see `octavo.kernels.ops.add_low_rank`.

    Args:
        out: See `octavo.kernels.ops.add_low_rank`.
        x: See `octavo.kernels.ops.add_low_rank`.
        adapters: Each row's adapter; -1 for none.
        matrices: Each adapter's matrices `[rank, inputs]` and `[outputs, rank]` and its scale; None
            if it does not adapt the layer.
    """
    for row, adapter in enumerate(adapters):
        if adapter >= 0 and (pair := matrices[adapter]) is not None:
            down, up, scale = pair
            product = up.double() @ (down.double() @ x[row].double())
            out[row] = (out[row].double() + scale * product).to(out.dtype)


def draw_tokens(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Sample a token from each row; see `octavo.kernels.logits.draw_tokens`.

    It sorts the whole vocabulary and computes in float64.
    """
    tokens = []
    for row, temperature, top_k, top_p, min_p, uniform in zip(logits, *sampling, strict=True):
        below = (row - row.max()).double()
        if temperature == 0.0:
            tokens.append(int(below.argmax()))
            continue
        weights, ids = (
            (below / max(temperature, MIN_TEMPERATURE)).exp().sort(descending=True, stable=True)
        )
        weights = weights[: int(top_k) or None]
        before = weights.cumsum(0) - weights
        kept = before < top_p * weights.sum()
        kept[0] = True
        if top_p >= 1.0:
            kept[:] = True
        kept &= weights >= min_p
        left = torch.zeros_like(below).index_put_((ids[: len(weights)],), weights * kept)
        running = left.cumsum(0)
        tokens.append(int((running > uniform * running[-1]).int().argmax()))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)
