"""Runs a model on a short text, to see what numbers it meets.

What linear layers are given, found so, tells how to fit their rounding.
"""

from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from octavo.common.models.errors import first_line
from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.model_shape import ModelShape
from octavo.kernels.metadata import AttentionMetadata

log = structlog.get_logger(__name__)

TOKENS = 512
LEAST_TOKENS = 64
"""Fewer than these of the text are no text: most of its words are unknown."""
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
    tokens = calibration_tokens(path, shape)
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
    run_alone(model, shape, tokens)
    for hook in hooks:
        hook.remove()
    return found


def calibration_tokens(path: str, shape: ModelShape) -> Tensor:
    """Return the text as `[count]` token ids; random ones where there is no tokenizer."""
    count = min(TOKENS, shape.max_position)
    text = Path(__file__).with_name("calibration.txt").read_text()
    try:
        ids = AutoTokenizer.from_pretrained(path)(text)["input_ids"]
        known = [token for token in ids if 0 <= token < shape.vocab_size][:count]
    except Exception as error:  # noqa: BLE001 - tokenizers have many ways to say so
        known = []
        log.info("the model's tokenizer cannot be read", error=first_line(error))
    # One that is made up of no files knows no words.
    if len(known) >= min(count, LEAST_TOKENS):
        return torch.tensor(known)
    log.warning("calibrating on random tokens, as the model has no tokenizer that works")
    generator = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocab_size, (count,), generator=generator)


def run_alone(
    model: PreTrainedModel, shape: ModelShape, tokens: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Runs a model on one sequence, in a cache of its own.

    Args:
        model: on any device.
        shape: its figures.
        tokens: `[count]` token ids on the CPU.

    Returns:
        Each layer's keys and values, in blocks of which the rest is zeros.
    """
    count, device = len(tokens), model.device
    blocks = -(-count // BLOCK_SIZE)
    size = (blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    metadata = AttentionMetadata(
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        block_tables=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        slot_mapping=torch.arange(count, device=device),
        max_query_len=count,
        max_seq_len=count,
    )
    layers = [
        (
            torch.zeros(size, dtype=model.dtype, device=device),
            torch.zeros(size, dtype=model.dtype, device=device),
        )
        for _ in range(shape.num_layers)
    ]
    with attending(PagedStep(metadata, layers)):
        model(
            input_ids=tokens[None].to(device),
            position_ids=torch.arange(count, device=device)[None],
            use_cache=False,
        )
    return layers
