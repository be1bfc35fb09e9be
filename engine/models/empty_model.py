"""Creates a model from its config alone, with weights that take no memory.

A weight is one zero in memory, with the weight's shape. The model runs: operators on a large weight
immediately return zeros of the right shape. So a run shows all properties that do not depend on
weights: attention, states, sizes.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from octavo.engine.models.deferred import DeferredTensor
from octavo.engine.models.experts.expert_layer import skip_experts
from octavo.engine.models.model_classes import auto_class
from octavo.engine.parallel.collectives import stages_apart

SMALL = 1 << 16
"""Maximum elements of a weight that has its own memory."""
LARGE = 1 << 22
"""Minimum elements of a result that is itself one zero."""


def make_on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model whose weights and buffers have shapes but no values: it cannot run.

    Args:
        config: The model's config.
        dtype: Dtype of its weights.
    """
    with torch.device("meta"), no_init_weights():
        model: Any = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
    model.tie_weights()
    made: PreTrainedModel = model
    return made


def make_empty(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with empty weights, and buffers as transformers computes them.

    Args:
        config: The model's config.
        dtype: Dtype of its weights.
    """
    model: Any = make_on_meta(config, dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001 - torch offers no other way
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")  # noqa: SLF001
        module._is_hf_initialized = False  # noqa: SLF001 - its buffers are not
    for weight in model.parameters():
        weight._is_hf_initialized = True  # noqa: SLF001 - torch offers no other way
    model.initialize_weights()
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, weight in module._parameters.items():  # noqa: SLF001
            if weight is not None:
                replacement = made.setdefault(weight, _empty(weight))
                module._parameters[name] = replacement  # noqa: SLF001
    skip_experts(model)
    empty: PreTrainedModel = model.eval()
    return empty


def _empty(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(_zeros(weight.shape, weight.dtype, SMALL), requires_grad=False)


@contextmanager
def running_empty() -> Iterator[None]:
    """Make operators skip the arithmetic with empty weights."""
    with stages_apart(), _ZeroResults():  # type: ignore[no-untyped-call]
        yield


class _ZeroResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns zeros from operators that take a large empty tensor."""

    def __torch_dispatch__(
        self,
        operator: Any,  # noqa: ANN401 - torch has no public type for it
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operator, or only its rule for shapes."""
        kwargs = kwargs or {}
        if not any(map(_is_empty, tree_leaves((args, kwargs)))):
            return operator(*args, **kwargs)
        if operator._schema.is_mutable and _is_empty(args[0]):  # noqa: SLF001
            return args[0]
        if _returns_view(operator):
            return operator(*args, **kwargs)
        try:
            out = operator(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        except (NotImplementedError, RuntimeError):  # its shape depends on values
            return operator(*args, **kwargs)
        return tree_map(_on_cpu, out)


def _returns_view(operator: Any) -> bool:  # noqa: ANN401
    """Return whether an operator returns or changes one of its arguments."""
    return any(returned.alias_info is not None for returned in operator._schema.returns)  # noqa: SLF001


def _is_empty(value: object) -> bool:
    if isinstance(value, DeferredTensor):
        return True
    if not isinstance(value, Tensor) or value.device.type == "meta" or value.numel() < SMALL:
        return False
    return value.untyped_storage().nbytes() <= value.itemsize


def _on_meta(value: object) -> object:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, Tensor):
        return value
    # An empty tensor has no strides that operators could depend on.
    if _is_empty(value):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value.to("meta")


def _on_cpu(value: object) -> object:
    return _zeros(value.shape, value.dtype, LARGE) if isinstance(value, Tensor) else value


def _zeros(shape: torch.Size, dtype: torch.dtype, most: int) -> Tensor:
    """Return zeros; fewer than `most` have their own memory."""
    if math.prod(shape) < most:
        return torch.zeros(shape, dtype=dtype)
    return torch.zeros((), dtype=dtype).expand(shape)
