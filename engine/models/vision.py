"""The vision part of a model, which encodes images apart from the steps of the text part."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import GELUActivation, GELUTanh

from octavo.common.models.image_families import IMAGE_FAMILIES
from octavo.common.pausable import pause_point
from octavo.engine.attention.ragged import TILED_ATTENTION
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.deferred import hold, present
from octavo.engine.models.empty_model import make_on_meta
from octavo.engine.models.linear.plain_linears import make_linear

BIDIRECTIONAL = frozenset({"gemma3"})
"""Types of models in which the tokens of an image attend to each other."""
ROTATED = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Types of models with rotary positions in three dimensions (M-RoPE)."""
TILES = {"idefics3": 1, "internvl": 0, "llama4": 0, "smolvlm": 1}
"""Dimension of tiles in the tensors of models that encode each tile by itself, by their type."""
GELUS: dict[type[nn.Module], bool] = {GELUActivation: False, GELUTanh: True, nn.GELU: False}
"""transformers' modules of GELU, and whether they approximate it by tanh."""
TEXT_PARTS = ("language_model", "text_model")
"""transformers' names of the text part."""


class PlacedImage(Protocol):
    """An image of a prompt; see `PromptImage` of the scheduler."""

    @property
    def places(self) -> np.ndarray:
        """Places of the tokens whose embeddings it replaces."""

    @property
    def tensors(self) -> Mapping[str, np.ndarray]:
        """What the vision encoder takes."""


class Vision:
    """Encodes images by transformers' own vision tower and projector.

    Args:
        parts: A model of transformers, without its text part and its head.

    Attributes:
        image_token_id: The token whose embeddings images replace.
        hidden_size: Size of embeddings.
        num_layers: Number of embeddings of a token: its own, and those added behind layers.
        bidirectional: Whether an image's tokens attend to each other.
        reach: Maximum place of the end of an image in a prompt; None: no limit.
        longest: Maximum tokens of a prompt from an image's first to its last; None: no limit.
    """

    def __init__(self, parts: PreTrainedModel) -> None:
        self._parts: Any = parts
        self.image_token_id: int = parts.config.image_token_id
        self.hidden_size: int = parts.config.get_text_config().hidden_size
        self.reach: int | None = None
        self.longest: int | None = None
        self.bidirectional = parts.config.model_type in BIDIRECTIONAL
        vision_config: Any = parts.config.vision_config
        self.num_layers = 1 + len(getattr(vision_config, "deepstack_visual_indexes", ()))
        rotated = parts.config.model_type in ROTATED
        self._tiles = TILES.get(parts.config.model_type)
        self._merge_size: int | None = vision_config.spatial_merge_size if rotated else None

    @property
    def weights(self) -> list[Tensor]:
        """The weights and buffers."""
        return [*self._parts.parameters(), *self._parts.buffers()]

    def place(self, device: torch.device, shape: ModelShape) -> None:
        """Read the weights, and move them to the device that encodes.

        Args:
            device: The device.
            shape: The text part's dimensions.
        """
        if self.bidirectional:  # a window would hide keys before an image from its first tokens
            windows = (layer.window for layer in shape.layers)
            self.reach = min((w for w in windows if w is not None), default=None)
        packed = device.type == "cpu" and _pack(self._parts)
        hold(self._parts)
        nn.Module.to(self._parts, device)  # the model's own method is untyped
        for part in self._parts.modules() if packed else ():
            if isinstance(part, nn.Conv2d):  # so that the elements of a patch are adjacent
                part.weight.data = part.weight.data.contiguous(memory_format=torch.channels_last)
        for part in self._parts.modules() if device.type == "cpu" else ():
            if not part._modules:  # noqa: SLF001 - other modules do nothing but call these
                part.register_forward_pre_hook(pause_point)
        for part in self._parts.children():
            if isinstance(part, PreTrainedModel):  # `set_attention` changed the text part's config
                part.set_attn_implementation(TILED_ATTENTION if packed else "sdpa")

    def rotary_positions(
        self, prompt: Sequence[int], images: Sequence[PlacedImage]
    ) -> np.ndarray | None:
        """Return `[3, len(prompt)]` int64, rotary positions of a prompt's tokens (M-RoPE).

        Text counts on; an image's tokens have its first position, plus their frame, row and column.
        None if positions are the tokens' places.
        """
        if self._merge_size is None:
            return None
        positions = np.empty((3, len(prompt)), np.int64)
        at = position = 0
        for image in images:
            start, end = int(image.places[0]), int(image.places[-1]) + 1
            positions[:, at:start] = position + np.arange(start - at)
            frames, rows, columns = image.tensors["image_grid_thw"][0].tolist()
            grid = frames, rows // self._merge_size, columns // self._merge_size
            position += start - at
            positions[:, start:end] = position + np.indices(grid).reshape(3, -1)
            position += max(grid[1:])
            at = end
        positions[:, at:] = position + np.arange(len(prompt) - at)
        return positions

    @torch.inference_mode()
    def encode(self, tensors: Mapping[str, np.ndarray], count: int) -> Tensor:
        """Return an image's embeddings, `[1 + deep, count, hidden_size]`.

        On a CPU it has pause points, before every layer without layers of its own.

        The first replace the embeddings of the image's tokens; the others are added to their hidden
        states behind each of the first layers (DeepStack).

        Args:
            tensors: What the model's processor makes of the image.
            count: The number of tokens that stand for it.

        Raises:
            ValueError: It has more or fewer embeddings.
        """
        weight = next(self._parts.parameters())
        device, takes = weight.device, inspect.signature(self._parts.get_image_features).parameters
        given = {name: torch.from_numpy(tensors[name]) for name in tensors if name in takes}
        inputs = {  # not all models convert the pixels
            name: each.to(device, weight.dtype if each.is_floating_point() else None)
            for name, each in given.items()
        }
        tiles, along = [inputs], self._tiles
        if along is not None and device.type == "cpu":  # a tile fits into a core's cache
            tiles = [
                {name: each.narrow(along, tile, 1) for name, each in inputs.items()}
                for tile in range(inputs["pixel_values"].shape[along])
            ]
        encoded = torch.cat([encode_image(self._parts, tile) for tile in tiles], 1)
        if encoded.shape[1] != count:
            raise ValueError(f"the image has {encoded.shape[1]} embeddings, for {count} tokens")
        return encoded


def encode_image(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:  # noqa: ANN401
    """Return an image's embeddings; see `Vision.encode`.

    Args:
        model: A model of transformers, or its vision part.
        inputs: What its vision encoder takes.
    """
    output: Any = model.get_image_features(**inputs, return_dict=True)
    projected = output.pooler_output
    if projected is None:  # Llama 4's forward pass projects them
        projected = model.multi_modal_projector(output.last_hidden_state)
    features = [projected, *getattr(output, "deepstack_features", ())]
    return torch.stack([_rows(each) for each in features])


def _rows(features: Any) -> Tensor:  # noqa: ANN401 - a tensor or several
    """Return features as `[tokens, hidden_size]`."""
    whole: Tensor = features if isinstance(features, Tensor) else torch.cat(list(features))
    return whole.reshape(-1, whole.shape[-1])


def _pack(parts: nn.Module) -> bool:
    """Use kernels for a vision part's linear layers, and for GELU; return whether there are any."""
    # Imported here because it loads the CPU kernels.
    from octavo.engine.models.linear.packed_linear import (  # noqa: PLC0415
        PackedLinear,
        has_kernels,
    )
    from octavo.kernels import cpu  # noqa: PLC0415

    children = [
        (parent, name, child)
        for parent in parts.modules()
        for name, child in parent.named_children()
    ]
    packed = False
    for parent, name, child in children:
        linear = _over_patches(child) if type(child) is nn.Conv3d else child
        if type(linear) is not nn.Linear or not has_kernels(linear):
            continue  # its weights are read by others, or it has another type
        packed = True
        # PyTorch's products (oneDNN) of many rows take a quarter less time on matrix units.
        if cpu.path != "amx" or linear.weight.dtype != torch.bfloat16:
            linear = PackedLinear(linear)
        setattr(parent, name, _Patches(linear) if type(child) is nn.Conv3d else linear)
    for parent, name, child in children if packed else ():
        if type(child) in GELUS and getattr(child, "approximate", "none") == "none":
            setattr(parent, name, _Gelu(tanh=GELUS[type(child)]))
    return packed


def _over_patches(layer: nn.Conv3d) -> nn.Linear:
    """Return the linear layer that computes the same of patches of the kernel's size."""
    bias = None if layer.bias is None else present(layer.bias.detach())
    return make_linear(present(layer.weight.detach()).flatten(1), bias)


class _Patches(nn.Module):
    """A convolution over patches of the kernel's size, by a linear layer."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self._linear = linear
        self.weight: Any = linear.weight  # whose dtype models read

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._linear(x.flatten(1))
        return out


class _Gelu(nn.Module):
    """GELU on a CPU with kernels."""

    def __init__(self, *, tanh: bool) -> None:
        super().__init__()
        self._tanh = tanh

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.octavo_cpu.gelu(x.contiguous(), self._tanh)
        return out


def make_text_part(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the text part of a config's model, on the meta device."""
    model = make_on_meta(config, torch.bfloat16)
    split_vision(model)
    return model


def split_vision(model: PreTrainedModel) -> Vision | None:
    """Split a model's vision encoder and projector off; what is left is a text model.

    Returns:
        The part; None if the model has none that is served.
    """
    if model.config.model_type not in IMAGE_FAMILIES:
        return None
    whole: Any = model.base_model
    parts = copy.copy(whole)
    parts._modules = {  # noqa: SLF001 - torch offers no other way
        name: part for name, part in whole.named_children() if name not in TEXT_PARTS
    }
    for name in parts._modules:  # noqa: SLF001
        delattr(whole, name)
    return Vision(parts)
