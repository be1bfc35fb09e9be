"""A model's files, and how to read its weights from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.engine.models.attention_layers import reference_attention
from octavo.engine.models.checks.module_routing import ModuleRouting
from octavo.engine.models.checks.probe import set_attention
from octavo.engine.models.checks.reference import Reference, with_rounding
from octavo.engine.models.checks.remembered import place_of
from octavo.engine.models.checks.weight_names import check_loading, check_weights
from octavo.engine.models.dimensions import fix_context
from octavo.engine.models.dtypes import choose_dtype
from octavo.engine.models.read_weights import (
    QuantizedCheckpoint,
    load_weights,
    open_checkpoint,
    read_config,
)
from octavo.engine.models.sharding.keep_part import keep_part
from octavo.engine.models.sharding.plan import ShardingPlan, make_plan
from octavo.engine.parallel.world import World


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files, and how to read its weights from them.

    Attributes:
        path: A directory or a hub name.
        config: The model's config.
        checkpoint: Its checkpoint if its weights are quantized.
        dtype: Dtype of its weights.
        device: The model's device.
        max_model_len: See `EngineSettings`.
        deferred: Whether large weights stay in the files until they are packed.
        whole_experts: Whether a rank holds some experts whole, instead of a slice of every expert.
    """

    path: str
    config: PreTrainedConfig
    checkpoint: QuantizedCheckpoint | None
    dtype: torch.dtype
    device: torch.device
    max_model_len: int | None
    deferred: bool
    whole_experts: bool

    @classmethod
    def open(
        cls,
        path: str,
        dtype: str,
        device: torch.device,
        max_model_len: int | None,
        *,
        quantized: bool,
        whole_experts: bool = False,
        text_alone: bool = False,
    ) -> "ModelSource":
        """Read everything except the weights.

        Args:
            path: See the attributes.
            dtype: See `EngineSettings`.
            device: See the attributes.
            max_model_len: See the attributes.
            quantized: Whether the weights will be quantized.
            whole_experts: See the attributes.
            text_alone: See `read_config`.
        """
        checkpoint = open_checkpoint(path)
        config = read_config(path, quantized=checkpoint is not None, text_alone=text_alone)
        kind = choose_dtype(dtype, config.get_text_config(), device)
        deferred = device.type == "cpu" or quantized
        return cls(path, config, checkpoint, kind, device, max_model_len, deferred, whole_experts)

    def read(self, world: World | None = None) -> PreTrainedModel:
        """Read the model, or this rank's part of it.

        Raises:
            ModelError: Its weights are not those of its class.
            UnsupportedModelError: The weights cannot be split over the ranks.
        """
        plan = None if world is None else self._plan(self.config, world)
        if world is None and not self.deferred:
            check_weights(self.path)  # before they are read, which takes long
            whole: PreTrainedModel = self._load()
            return whole
        loaded: tuple[PreTrainedModel, dict[str, Any]] = self._load(
            deferred=True, ignore_mismatched_sizes=True, output_loading_info=True
        )
        check_loading(self.path, *loaded)
        model = loaded[0]
        if plan is not None and world is not None:
            keep_part(model, plan, world)
        return model

    def keep_part_of(self, model: PreTrainedModel, world: World) -> None:
        """Keep this rank's part of a small model of the same type."""
        keep_part(model, self._plan(model.config, world), world)

    def _plan(self, config: PreTrainedConfig, world: World) -> ShardingPlan:
        return make_plan(config, world.size, whole_experts=self.whole_experts)

    def _load(self, **options: Any) -> Any:  # noqa: ANN401 - see `load_weights`
        """Load the model with transformers."""
        return load_weights(
            self.path,
            self.config,
            self.checkpoint,
            dtype=self.dtype,
            attn_implementation="eager",  # all classes have it
            device_map=self.device,
            **options,
        )

    def place(self, block_size: int) -> Path | None:
        """Return the cache file of its checks' outcome; None if the model is in no directory.

        Args:
            block_size: Tokens per block.
        """
        if not Path(self.path).is_dir():
            return None
        settings = {
            "dtype": str(self.dtype),
            "device": self.device.type,
            "max_model_len": self.max_model_len,
            "block_size": block_size,
        }
        return place_of(Path(self.path), settings)

    def measure_rounding(self, known: Reference, number: int) -> Reference:
        """Add the rounding errors of one forward pass of transformers; see `SelfCheck`."""
        model: PreTrainedModel = self._load(deferred=True)  # memory may not hold another one
        model.train(mode=False)
        fix_context(model, self.max_model_len)
        set_attention(model, reference_attention(self.config))
        return with_rounding(known, model, ModuleRouting(model), passes=1, first=number)
