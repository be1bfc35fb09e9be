"""Creates a small twin of a large model, to check the structure of both in float32.

A model's use of masks, positions and states depends on its config and code, not on its weights. So
a twin has the same attention and a layer of each kind, but a small vocabulary, narrow feed-forward
layers and random weights.
"""

import copy
import math
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.engine.models.model_classes import auto_class

VOCABULARY = 1024
INNER = 128
"""Maximum inner size of a feed-forward layer."""
ALIGNED = 4
"""Divisor of a rank's part of it: grouped products take rows of whole 16 bytes."""
INNER_NAMES = ("intermediate", "ffn_dim", "ffn_hidden", "n_inner", "d_ff")
"""Parts of names of config settings with this size."""
LEAST_LAYERS = 2
VISION_DEPTHS = ("num_hidden_layers", "depth")
"""Names of config settings with the number of a vision encoder's layers."""
VISION_LAYERS = 2
VISION_SIDE = 8
"""Maximum patches of a side of an image, which models merge by 2 x 2 or 4 x 4."""
SHARE = 0.1
"""Size of the random offset of vectors, so that no bias is zero."""


def make_twin(model: PreTrainedModel, ranks: int = 1) -> PreTrainedModel:
    """Return a small model of the same type, with random float32 weights, on a CPU.

    It has a vision part if its type has one.

    Args:
        model: The model, or a rank's part of it; its weights are not read.
        ranks: The number of ranks among which its sizes can be divided.

    Raises:
        Exception: Transformers refuses a config that cannot be made smaller.
    """
    config = _narrow(model, ranks)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = auto_class(config).from_config(
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
        _randomize(made)
    twin: PreTrainedModel = made.eval()
    return twin


def _narrow(model: PreTrainedModel, ranks: int) -> PreTrainedConfig:
    """Return a model's config with fewer layers, and narrow ones."""
    inner = math.ceil(INNER / (ALIGNED * ranks)) * ALIGNED * ranks
    config: PreTrainedConfig = copy.deepcopy(model.config)
    text_config: Any = config.get_text_config(decoder=True)
    count: int = text_config.num_hidden_layers
    kept = _count_layers(model, text_config)
    text_config.vocab_size = min(text_config.vocab_size, VOCABULARY)
    for name, value in list(vars(text_config).items()):
        if _is_list(value, count):
            setattr(text_config, name, type(value)(value[:kept]))
        elif any(part in name for part in INNER_NAMES) and isinstance(value, int):
            setattr(text_config, name, min(value, inner))
        elif name.endswith("_token_id") and isinstance(value, int):
            setattr(text_config, name, value if value < text_config.vocab_size else None)
    text_config.num_hidden_layers = kept
    vision_config: Any = getattr(config, "vision_config", None)
    for name in VISION_DEPTHS:
        if isinstance(depth := getattr(vision_config, name, None), int):
            setattr(vision_config, name, min(depth, VISION_LAYERS))
    if getattr(vision_config, "deepstack_visual_indexes", None):
        vision_config.deepstack_visual_indexes = list(range(VISION_LAYERS))
    if hasattr(vision_config, "image_size"):
        side: Any = vision_config.image_size
        patch: Any = vision_config.patch_size
        square = patch[0] if isinstance(patch, list | tuple) else patch
        least = min(square * VISION_SIDE, side[0] if isinstance(side, list | tuple) else side)
        vision_config.image_size = least if isinstance(side, int) else type(side)([least, least])
        if getattr(config, "image_grid_pinpoints", None):  # two tiles beside each other
            config.image_grid_pinpoints = [[least, 2 * least]]
    if hasattr(config, "mm_tokens_per_image"):
        config.mm_tokens_per_image = 4
    if isinstance(getattr(config, "image_token_id", None), int):
        config.image_token_id = min(config.image_token_id, text_config.vocab_size - 1)
    return config


def _count_layers(model: PreTrainedModel, config: Any) -> int:  # noqa: ANN401
    """Return the number of leading layers that include every kind of layer."""
    count: int = config.num_hidden_layers
    layer_lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    lists = [value for value in vars(config).values() if _is_list(value, count)]
    kinds = [
        (
            *(repr(values[number]) for values in lists),
            *(_kind(layers[number]) for layers in layer_lists),
        )
        for number in range(count)
    ]
    last = max(map(kinds.index, set(kinds)))  # the first layer of the last kind
    return min(count, max(LEAST_LAYERS, last + 1))


def _is_list(value: object, count: int) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Return whether a config's value is a list with an item for each of `count` layers."""
    return isinstance(value, list | tuple) and len(value) == count


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Return the types of a layer's modules and the shapes of its weights."""
    modules = tuple((path, type(part).__name__) for path, part in layer.named_modules())
    return modules, tuple((name, tuple(part.shape)) for name, part in layer.named_parameters())


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Set weights that make every part of a model affect the result."""
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if weight.dim() > 1 and isinstance(module, nn.Embedding):
                weight.normal_()
            elif weight.dim() > 1 and (weight.dim() == 3 or isinstance(module, nn.Linear)):
                weight.normal_(std=1 / math.sqrt(weight.shape[-1]))
            elif weight.dim() == 1:
                weight.add_(SHARE * torch.randn_like(weight))
            elif not weight.any():
                weight.normal_(std=1 / math.sqrt(weight.shape[0]))
