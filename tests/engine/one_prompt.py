"""A step run by itself, on one prompt."""

import torch

from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.models.quantization.calibration import BLOCK_SIZE
from octavo.kernels.metadata import AttentionMetadata, LayerCache


def logits(step, shape, inputs):
    """Runs a step in bfloat16; `inputs` are all tokens, positions and logit rows of a prompt."""
    count = inputs[0].shape[1]
    blocks = -(-count // BLOCK_SIZE)
    metadata = AttentionMetadata(
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(count),
        max_query_len=count,
        max_seq_len=count,
    )
    layers = [
        LayerCache(
            *(
                torch.zeros((blocks, layer.num_kv_heads, BLOCK_SIZE, dim), dtype=torch.bfloat16)
                for dim in (layer.key_dim, layer.value_dim)
            )
        )
        for layer in shape.layers
    ]
    with torch.inference_mode(), attending(PagedStep([metadata], layers)):
        return step(*(x.clone() for x in inputs))  # made here, as an engine's are
