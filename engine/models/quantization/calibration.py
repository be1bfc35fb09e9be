"""Runs a model on a short text, to measure the range of its layers' inputs, keys and values."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from octavo.common.models.errors import first_line
from octavo.common.models.tokenizer import load_tokenizer
from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.memory.cache_tensors import layer_caches, state_caches
from octavo.engine.model_shape import ModelShape
from octavo.engine.parallel.world import current_world
from octavo.kernels.metadata import AttentionMetadata, LayerCache

log = structlog.get_logger(__name__)

MAX_TOKENS = 512
MIN_TOKENS = 64
"""Minimum number of known tokens: with fewer, the tokenizer does not know the text's words."""
SAMPLES = 128
MIN_ROWS = 8
"""Minimum rows of an expert: with fewer, rows of all experts are used."""
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Inputs:
    """A layer's inputs on the text.

    Attributes:
        absmax: `[in_features]` float32, the greatest magnitude of each input.
        samples: `[n, in_features]` float32, the inputs of some tokens.
    """

    absmax: Tensor
    samples: Tensor


@dataclass(frozen=True, slots=True)
class ExpertInputs:
    """The inputs of an expert layer on the text.

    Attributes:
        rows: `[n, hidden]`, of the model's dtype.
        expert_ids: `[n, chosen]` int64, each row's experts.
    """

    rows: Tensor
    expert_ids: Tensor

    def of(self, expert: int) -> Tensor:
        """Return the rows of an expert in float32; some of all rows if they are too few."""
        rows = self.rows[(self.expert_ids == expert).any(1)]
        return (rows if len(rows) >= MIN_ROWS else self.rows[1 : 1 + SAMPLES]).float()

    def busiest(self, experts: int, most: int) -> list[int]:
        """Return at most `most` of the layer's experts, those with the most rows."""
        chosen = self.expert_ids[self.expert_ids < experts]
        counts = chosen.bincount(minlength=experts)
        busiest: list[int] = counts.topk(min(most, experts)).indices.tolist()
        return busiest


@dataclass(frozen=True, slots=True)
class Calibration:
    """The inputs of layers on the calibration text, by the layers' names.

    Attributes:
        linears: The inputs of each given linear layer that the model calls.
        experts: The inputs of each given expert layer.
    """

    linears: dict[str, Inputs]
    experts: dict[str, ExpertInputs]


@torch.inference_mode()
def calibrate(
    model: PreTrainedModel,
    run: Callable[[], object],
    linears: Collection[str],
    experts: Collection[str],
) -> Calibration:
    """Run a model on the text; return the inputs of some of its layers.

    Args:
        model: A model on a CPU.
        run: Runs it on the text.
        linears: The names of linear layers.
        experts: The names of expert layers.
    """
    calibration = Calibration({}, {})
    world = current_world()
    alone = world is None or world.stages == 1  # other stages may need this one's hidden states
    if alone and not linears and not experts:
        return calibration
    hooks = [
        *_record_linears(model, linears, calibration.linears),
        *_record_experts(model, experts, calibration.experts),
    ]
    run()
    for hook in hooks:
        hook.remove()
    return calibration


def _record_experts(
    model: PreTrainedModel, names: Collection[str], recorded: dict[str, ExpertInputs]
) -> list[RemovableHandle]:
    def record(name: str, rows: Tensor, expert_ids: Tensor) -> None:
        recorded[name] = ExpertInputs(rows.clone(), expert_ids.clone())

    return [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, name=name: record(name, inputs[0], inputs[1])
        )
        for name in names
    ]


def _record_linears(
    model: PreTrainedModel, names: Collection[str], recorded: dict[str, Inputs]
) -> list[RemovableHandle]:

    def record(name: str, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1])
        absmax = rows.float().abs().amax(0)
        if name in recorded:  # a shared layer
            absmax = torch.maximum(absmax, recorded[name].absmax)
        # Skip the first token: it gets most attention, and its activations are unlike the others.
        samples = rows[1 :: max(1, len(rows) // SAMPLES)]
        recorded[name] = Inputs(absmax.clone(), samples.float().clone())

    return [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, name=name: record(name, inputs[0])
        )
        for name in names
    ]


def calibration_tokens(path: str, shape: ModelShape) -> Tensor:
    """Return the text as `[count]` token ids; random ids if the tokenizer is unusable."""
    count = min(MAX_TOKENS, shape.max_position)
    text = Path(__file__).with_name("calibration.txt").read_text()
    try:
        ids = load_tokenizer(Path(path))(text, verbose=False)["input_ids"]
        known = [token for token in ids if 0 <= token < shape.vocab_size][:count]
    except Exception as error:  # noqa: BLE001 - tokenizers raise many types
        known = []
        log.info("the model's tokenizer cannot be read", error=first_line(error))
    # A tokenizer without files knows no words.
    if len(known) >= min(count, MIN_TOKENS):
        return torch.tensor(known)
    log.warning("calibrating on random tokens: the model has no usable tokenizer")
    generator = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocab_size, (count,), generator=generator)


def run_alone(model: PreTrainedModel, shape: ModelShape, tokens: Tensor) -> list[LayerCache]:
    """Run a model on one sequence, in a separate cache.

    Args:
        model: A model on any device.
        shape: The model's dimensions.
        tokens: `[count]` token ids on the CPU.

    Returns:
        Each layer's keys and values, if it has any, in blocks padded with zeros.
    """
    count, device = len(tokens), model.device
    step = step_alone(shape, count, model.dtype, device)
    with attending(step):
        model(
            input_ids=tokens[None].to(device),
            position_ids=torch.arange(count, device=device)[None],
            use_cache=False,
        )
    return [
        LayerCache(layer.keys[table], None if layer.values is None else layer.values[table])
        for layer in step.layers
        for table in step.groups[layer.group].block_tables
    ]


def step_alone(
    shape: ModelShape, count: int, dtype: torch.dtype, device: torch.device
) -> PagedStep:
    """Return the step of a prompt of `count` tokens in a separate cache, filled with zeros."""
    layout = plan_layout(shape, BLOCK_SIZE, dtype, dtype)
    numbers = layout.sequence_blocks(count)
    cache = torch.zeros((sum(numbers), layout.block_elements), dtype=dtype, device=device)
    groups, first = [], 0
    for layers, blocks in zip(layout.groups, numbers, strict=True):
        at = first * layers.block_size
        groups.append(
            AttentionMetadata(
                query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
                block_tables=torch.arange(first, first + blocks, dtype=torch.int32, device=device)[
                    None
                ],
                slot_mapping=torch.arange(at, at + count, device=device),
                max_query_len=count,
                max_seq_len=count,
            )
        )
        first += blocks
    states = state_caches(cache, layout, dtype)
    return PagedStep(groups, layer_caches(cache, layout), states=states)
