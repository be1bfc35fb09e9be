"""Loads this rank's part of a model.

transformers reads the parts: `from_pretrained` with a plan makes each split weight a `DTensor` and
reads only this rank's slice of it from the safetensors file. Its own hooks, which would sum the
ranks' results, are not used: the layers of `sharded_layers.py` can be packed, quantized and
compiled like any others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from transformers import PreTrainedModel
from transformers.distributed import mixin
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
from transformers.pytorch_utils import Conv1D

from octavo.engine.models.sharding.plan import (
    COLUMNS,
    COLUMNS_TRANSPOSED,
    EXPERTS,
    KEYS_VALUES,
    PACKED,
    ROWS,
    ROWS_TRANSPOSED,
    THREE_TRANSPOSED,
    VOCABULARY,
    WHOLE,
    WHOLE_EXPERTS,
    ShardingPlan,
)
from octavo.engine.models.sharding.sharded_layers import (
    SummedLinear,
    VocabularyEmbedding,
    sum_experts,
    sum_whole_experts,
)
from octavo.engine.parallel.world import World

PLACEMENTS: dict[str, Callable[[str, Tensor], Placement]] = {
    COLUMNS: lambda _, weight: Shard(max(0, weight.dim() - 2)),
    ROWS: lambda name, weight: _whole_bias(name, Shard(weight.dim() - 1)),
    VOCABULARY: lambda *_: Shard(0),
    PACKED: lambda _, weight: _StridedShard(max(0, weight.dim() - 2), split_factor=2),
    EXPERTS: lambda *_: Replicate(),
    WHOLE_EXPERTS: lambda *_: Shard(0),
    WHOLE: lambda *_: Replicate(),
    KEYS_VALUES: lambda *_: Replicate(),
    COLUMNS_TRANSPOSED: lambda _, weight: Shard(weight.dim() - 1),
    ROWS_TRANSPOSED: lambda name, weight: _whole_bias(name, Shard(max(0, weight.dim() - 2))),
    THREE_TRANSPOSED: lambda _, weight: _StridedShard(weight.dim() - 1, split_factor=3),
}
"""Returns a rank's part of a weight, from its module's style, its name and itself."""
ADDS_UP = {ROWS, ROWS_TRANSPOSED}
PREFIX = "octavo_part_"


def _whole_bias(name: str, otherwise: Placement) -> Placement:
    return Replicate() if name == "bias" else otherwise


class _Part(TensorParallelLayer):
    """A style that selects the part of a weight to read, and changes no module."""

    def __init__(self, place: Callable[[str, Tensor], Placement]) -> None:
        self._place = place

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Replace a parameter by this rank's part."""
        weight = module._parameters.get(param)  # noqa: SLF001 - as transformers does
        if weight is None:
            return
        placed = distribute_tensor(weight, mesh, [self._place(param, weight)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(placed, requires_grad=False)  # noqa: SLF001

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002
        """Leave a module as it is."""
        return module


_styles: Any = ALL_PARALLEL_STYLES  # declared to hold functions, but holds styles
for _style, _place in PLACEMENTS.items():
    _styles.register(PREFIX + _style, _Part(_place))


def load_shard(
    read: Callable[..., PreTrainedModel], dtype: torch.dtype, plan: ShardingPlan, world: World
) -> PreTrainedModel:
    """Load this rank's part of a model, with layers that sum over ranks where needed.

    Args:
        read: Transformers' `from_pretrained` for the model; takes its options.
        dtype: Dtype of its weights.
        plan: The plan of its parts.
        world: The ranks; all of them call this.
    """
    styles = {name: PREFIX + style for name, style in plan.styles.items()}
    with _stages_by_octavo():
        model = read(
            dtype=dtype,
            attn_implementation="eager",
            distributed_config=DistributedConfig(
                tp_size=world.size, tp_plan=styles, pp_size=world.stages
            ),
        )
    with torch.no_grad():
        _take_parts(model)
        _split_heads(model, plan, world)
        _set_sizes(model, plan)
        _add_up(model, plan, world)
    return model


@contextmanager
def _stages_by_octavo() -> Iterator[None]:
    """Keep transformers from its own stages of equal numbers of layers; see `stages.py`."""
    module: Any = mixin
    own = module.apply_pipeline_parallelism
    module.apply_pipeline_parallelism = lambda model, _: model
    try:
        yield
    finally:
        module.apply_pipeline_parallelism = own


def _take_parts(model: nn.Module) -> None:
    """Replace each `DTensor` by its local tensor; tied weights stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():  # noqa: SLF001
            if isinstance(weight, DTensor):
                parameter = made.setdefault(
                    id(weight), nn.Parameter(weight.to_local().detach(), requires_grad=False)
                )
                module._parameters[name] = parameter  # noqa: SLF001


def _split_heads(model: nn.Module, plan: ShardingPlan, world: World) -> None:
    """Keep one KV head on this rank, if several ranks share a head."""
    for path, module in model.named_modules():
        if plan.style_of(path) != KEYS_VALUES:
            continue
        attention: Any = model.get_submodule(path.rpartition(".")[0])
        dim: int = attention.head_dim
        for name, weight in module.named_parameters(recurse=False):
            head = world.rank * (len(weight) // dim) // world.size
            part = weight[head * dim : (head + 1) * dim].clone()
            module._parameters[name] = nn.Parameter(part, requires_grad=False)  # noqa: SLF001


def _set_sizes(model: nn.Module, plan: ShardingPlan) -> None:
    """Set modules' sizes to those of this rank's part."""
    for path, module in model.named_modules():
        marked: Any = module
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, Conv1D):
            marked.nx, marked.nf = module.weight.shape
        for name in plan.divided(path):
            setattr(marked, name, getattr(marked, name) // plan.size)


def _add_up(model: PreTrainedModel, plan: ShardingPlan, world: World) -> None:
    """Make ranks sum the outputs of which each computes a part."""
    embeddings = model.get_input_embeddings()
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    for path, module in list(model.named_modules()):
        style = plan.style_of(path)
        parent, _, name = path.rpartition(".")
        if style in ADDS_UP:
            setattr(model.get_submodule(parent), name, SummedLinear(module, world))
        elif style == EXPERTS and plan.has_whole_experts:
            sum_whole_experts(module, world)
        elif style == EXPERTS:
            sum_experts(module, world)
        elif module is embeddings and style == VOCABULARY:
            first = world.start_of(vocabulary)
            setattr(model.get_submodule(parent), name, VocabularyEmbedding(module, first))
