"""The logits of the whole model, for ranks that hold a part of it.

The parts are held to transformers' own forward pass of the whole model, not to one that is split by
the same plan. Rank 0 runs it with the weights left in their files: one layer at a time is in
memory.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.engine.model_shape import ModelShape
from octavo.engine.models.attention_layers import reference_attention
from octavo.engine.models.checks.module_routing import ModuleRouting
from octavo.engine.models.checks.reference import Reference, reference, with_rounding
from octavo.engine.models.checks.routing import Choice
from octavo.engine.models.quantization.checkpoints.reader import load_weights
from octavo.engine.ranks.world import World

CPU = torch.device("cpu")


def whole_reference(
    path: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    shape: ModelShape,
    world: World,
    *,
    prepare: Callable[[PreTrainedModel], Any],
) -> Reference:
    """Return the logits of transformers' forward pass on rank 0, on all ranks.

    Args:
        path: A directory.
        config: The model's.
        dtype: Of its weights.
        shape: The dimensions of a part.
        world: The ranks, all of which call this.
        prepare: Called with the model before it runs.
    """
    if world.rank:
        tokens, logits, rounding, *flat = world.share(None)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return Reference(tokens, logits, rounding, tuple(Choice(*pair) for pair in pairs))
    with _on_disk(path, config, torch.float32, prepare) as model:
        _round_to(dtype, model)
        own = reference(model, shape, ModuleRouting(model), CPU)
    if dtype != torch.float32:
        with _on_disk(path, config, dtype, prepare) as model:
            own = with_rounding(
                own, model, ModuleRouting(model), CPU, passes=1
            )  # it reads the disk
    flat = [tensor for choice in own.choices for tensor in choice]
    world.share([own.tokens, own.logits, own.rounding, *flat])
    return own


class _Rounded(Mapping[str, torch.Tensor]):
    """Weights that are rounded to a dtype as they are read, and keep their own.

    Args:
        weights: By name.
        dtype: What they are rounded to.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        return weight.to(self._dtype).to(weight.dtype) if weight.is_floating_point() else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _round_to(dtype: torch.dtype, model: PreTrainedModel) -> None:
    """Have a model compute with weights of `dtype`, as the parts do, whatever its files have."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for own in getattr(hook, "hooks", (hook,)):
            if isinstance(own, AlignDevicesHook) and own.weights_map is not None:
                own.weights_map = _Rounded(own.weights_map, dtype)


@contextmanager
def _on_disk(
    path: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    prepare: Callable[[PreTrainedModel], Any],
) -> Iterator[PreTrainedModel]:
    """Load a model whose weights stay in their files, and are read in `dtype` when they are used.

    Args:
        path: As for `whole_reference`, like those below.
        config: Likewise.
        dtype: Likewise.
        prepare: Likewise.
    """
    # It warns that weights stay in their files, which is what is wanted.
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="octavo-reference-") as folder:
        model = load_weights(
            path,
            config,
            None,
            dtype=dtype,
            attn_implementation=reference_attention(config),
            device_map={"": "disk"},
            offload_folder=folder,
        )
        model.train(mode=False)
        prepare(model)
        yield model
