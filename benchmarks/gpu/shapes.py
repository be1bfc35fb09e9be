"""Attention shapes of popular models, and batches for them."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from octavo.kernels import ops
from octavo.kernels.metadata import AttentionMetadata, AttentionShape
from octavo.kernels.ops import FP8_DTYPES
from octavo.kernels.whole_numbers import width_of


@dataclass(frozen=True, slots=True)
class Layout:
    """A model's sizes."""

    model: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @property
    def hidden_size(self) -> int:
        """Elements of a token's hidden state."""
        return self.num_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' products: attention's and a SwiGLU's."""
        kv_size = self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (self.hidden_size + kv_size)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Weights of the output projection."""
        return self.hidden_size * self.vocab_size

    @property
    def kv_elements(self) -> int:
        """Elements of a token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


LLAMA_7B = Layout("LLaMA-7B", 32, 32, 32, 128, 11_008, 32_000)
LLAMA_13B = Layout("LLaMA-13B", 40, 40, 40, 128, 13_824, 32_000)
LLAMA_3_8B = Layout("Llama-3-8B", 32, 32, 8, 128, 14_336, 128_256)
QWEN3_8B = Layout("Qwen3-8B", 36, 32, 8, 128, 12_288, 151_936)
SMOLLM2 = Layout("SmolLM2-135M", 30, 9, 3, 64, 1536, 49_152)

BLOCK_SIZE = 16
MEMORY_SHARE = 0.9
"""Maximum share of a GPU's free memory for a batch and the peers' copies of a layer."""
FP8_SCALE = 0.02
"""Divisor of random keys and values, so that they fill fp8's range."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Attention of one layer after another, with keys and values both paged and contiguous.

    Each layer has its own copy of the same keys and values: so none finds them in a GPU's L2 cache,
    and they are as scattered as in service.

    Attributes:
        query: `[num_tokens, num_heads, head_dim]`.
        key: `[num_keys, num_kv_heads, head_dim]`, all sequences end to end.
        value: `[num_keys, num_kv_heads, head_dim]`, in the order of `key`.
        caches: Each layer's keys and values in blocks, in random order.
        metadata: Lengths and block tables of the batch.
        options: Further arguments of `octavo.kernels.ops.paged_attention`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    metadata: AttentionMetadata
    options: dict[str, float]

    @property
    def cache_dtype(self) -> torch.dtype:
        """The type of keys and values in blocks."""
        return self.caches[0][0].dtype

    def attend(self, layer: int = 0) -> torch.Tensor:
        """Run the kernels for a layer."""
        return ops.paged_attention(self.query, *self.caches[layer], self.metadata, **self.options)

    def attend_all(self) -> None:
        """Run the kernels for every layer."""
        for layer in range(len(self.caches)):
            self.attend(layer)


def make_batch(
    layout: Layout,
    lengths: list[tuple[int, int]],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
) -> Batch:
    """Return a random batch from each sequence's (queries, tokens).

    The cache has all of the model's layers, or as many as fit in memory.
    """
    query_lens, seq_lens = np.array(lengths).T
    counts = -(-seq_lens // BLOCK_SIZE)
    num_blocks = int(counts.sum())
    order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    tables = np.zeros((len(lengths), counts.max()), np.int32)
    tables[np.arange(counts.max()) < counts[:, None]] = order
    seqs = np.repeat(np.arange(len(lengths)), seq_lens)
    ends = np.cumsum(seq_lens)
    positions = np.arange(ends[-1]) - np.repeat(ends - seq_lens, seq_lens)
    slots = tables[seqs, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
    slots += positions % BLOCK_SIZE

    def numbers(count: int, heads: int) -> torch.Tensor:
        return torch.randn((count, heads, layout.head_dim), dtype=dtype, device=device)

    query = numbers(int(query_lens.sum()), layout.num_heads)
    key, value = (numbers(len(slots), layout.num_kv_heads) for _ in range(2))
    kept = cache_dtype or dtype
    block = (2, layout.num_kv_heads, BLOCK_SIZE, width_of(layout.head_dim, kept))
    layers = count_layers(layout, num_blocks * math.prod(block) * kept.itemsize, device)
    cache = torch.empty((num_blocks, layers, *block), dtype=kept, device=device)
    caches = [(cache[:, layer, 0], cache[:, layer, 1]) for layer in range(layers)]
    scales = {"key_scale": FP8_SCALE, "value_scale": FP8_SCALE} if kept in FP8_DTYPES else {}
    places = torch.from_numpy(slots).to(device)
    for key_cache, value_cache in caches:
        ops.write_kv(key, value, key_cache, value_cache, places, **scales)
    metadata = AttentionMetadata(
        query_starts=torch.from_numpy(np.cumsum([0, *query_lens]).astype(np.int32)).to(device),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        slot_mapping=torch.zeros(len(query), dtype=torch.int64, device=device),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
    )
    options = {"scale": layout.head_dim**-0.5, **scales}
    batch = Batch(query, key, value, caches, metadata, options)
    return replan(batch, layout, lengths)


def count_layers(layout: Layout, layer_bytes: int, device: torch.device) -> int:
    """Return the number of the model's layers whose keys and values fit in memory."""
    if device.type != "cuda":
        return layout.num_layers
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    # One layer's are also contiguous, and other implementations copy those.
    return max(1, min(layout.num_layers, int(MEMORY_SHARE * free) // layer_bytes - 2))


def replan(batch: Batch, layout: Layout, lengths: list[tuple[int, int]]) -> Batch:
    """Return the batch with a new plan for the current tile sizes."""
    query_lens, seq_lens = np.array(lengths).T
    shape = AttentionShape(
        num_heads=layout.num_heads,
        num_kv_heads=layout.num_kv_heads,
        key_dim=layout.head_dim,
        value_dim=layout.head_dim,
        dtype=batch.query.dtype,
        cache_dtype=batch.cache_dtype,
        device=batch.query.device,
    )
    plan = ops.plan_attention(query_lens, seq_lens, shape)
    return replace(batch, metadata=replace(batch.metadata, plan=plan))
