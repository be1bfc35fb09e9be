"""What linear layers are given, found on a short text: so their rounding can be fitted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from engine.executor.paged_attention import PagedStep, attending
from engine.executor.shape import ModelShape
from kernels.metadata import AttentionMetadata

TOKENS = 512
SAMPLES = 128
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Inputs:
    """A layer's inputs on the text.

    Attributes:
        reach: `[in_features]` float32, the greatest magnitude of each.
        samples: `[n, in_features]` float32, those of some tokens.
    """

    reach: Tensor
    samples: Tensor


@torch.inference_mode()
def calibrate(model: PreTrainedModel, shape: ModelShape, path: str) -> dict[str, Inputs]:
    """Runs a model on the text, or on random tokens where it has no tokenizer.

    Args:
        model: on CPU.
        shape: its figures.
        path: where its tokenizer is.

    Returns:
        The inputs of each linear layer that was called, by its name in the model.
    """
    tokens = _tokens(path, shape)
    found: dict[str, Inputs] = {}

    def watch(name: str, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1])
        reach = rows.float().abs().amax(0)
        if name in found:  # a layer that is shared
            reach = torch.maximum(reach, found[name].reach)
        # Not the first: it draws all attention, and its activations are like no other's.
        samples = rows[1 :: max(1, len(rows) // SAMPLES)]
        found[name] = Inputs(reach.clone(), samples.float().clone())

    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: watch(name, inputs[0]))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    with _alone(shape, len(tokens), model.dtype):
        model(
            input_ids=tokens[None],
            position_ids=torch.arange(len(tokens))[None],
            use_cache=False,
        )
    for hook in hooks:
        hook.remove()
    return found


def _tokens(path: str, shape: ModelShape) -> Tensor:
    """`[count]` token ids."""
    count = min(TOKENS, shape.max_position)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        generator = torch.Generator().manual_seed(0)
        return torch.randint(shape.vocab_size, (count,), generator=generator)
    text = Path(__file__).with_name("calibration.txt").read_text()
    return torch.tensor(tokenizer(text)["input_ids"][:count])


@contextmanager
def _alone(shape: ModelShape, count: int, dtype: torch.dtype) -> Iterator[None]:
    """A step of one sequence of `count` tokens in a cache of its own."""
    blocks = -(-count // BLOCK_SIZE)
    size = (blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    metadata = AttentionMetadata(
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(count),
        max_query_len=count,
        max_seq_len=count,
    )
    layers = [
        (torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype))
        for _ in range(shape.num_layers)
    ]
    with attending(PagedStep(metadata, layers)):
        yield
