"""The division of a model among ranks, from transformers' plan.

Transformers' plan (`tp_plan`) gives each module's style of splitting, by name. It is data, like the
plans here for families without one.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.common.models.errors import UnsupportedModelError
from octavo.engine.models.attention_layers import METHODS, SPLITTABLE
from octavo.engine.models.checks.latents import LINEAR as LATENT_EXPANSION
from octavo.engine.models.vision import make_text_part

COLUMNS, ROWS, VOCABULARY = "colwise", "rowwise", "embedding_rowwise"
HEAD = "colwise_gather_output"
PACKED, EXPERTS = "packed_colwise", "moe_tp_experts"
PACKED_TRANSPOSED = "packed_rowwise"
"""Style of Llama 4's gates and up projections, whose inputs are first."""
WHOLE = "replicate"
WHOLE_EXPERTS = "octavo_whole_experts"
"""Style of experts' weights of which each rank has whole experts."""
KEYS_VALUES = "octavo_keys_values"
"""Style of keys and values with fewer heads than ranks: several ranks share a head."""
THREE_TRANSPOSED, ROWS_TRANSPOSED = "octavo_three_transposed", "octavo_rows_transposed"
COLUMNS_TRANSPOSED = "octavo_columns_transposed"
"""Styles of weights that have inputs first: GPT-2's `Conv1D`, whose q, k and v are one layer, and
GPT-OSS's experts, whose gates and up projections alternate."""

SAME = {"replicated_with_grad_allreduce": WHOLE, HEAD: WHOLE}
"""Own styles by transformers': some differ only in training, and each rank has all of layers whose
outputs ranks would gather, such as those of states."""
LATENT_STYLES = {"q_proj": COLUMNS, "q_b_proj": COLUMNS, LATENT_EXPANSION: COLUMNS, "o_proj": ROWS}
"""Styles of latent attention's layers; each rank has all of the others, and caches all latents."""
STYLES = {COLUMNS, ROWS, VOCABULARY, PACKED, PACKED_TRANSPOSED, EXPERTS, WHOLE}
OWN_PLANS: dict[str, dict[str, str]] = {
    "gpt2": {
        "transformer.wte": VOCABULARY,
        "lm_head": HEAD,
        "transformer.h.*.attn.c_attn": THREE_TRANSPOSED,
        "transformer.h.*.attn.c_proj": ROWS_TRANSPOSED,
        "transformer.h.*.mlp.c_fc": COLUMNS_TRANSPOSED,
        "transformer.h.*.mlp.c_proj": ROWS_TRANSPOSED,
    },
    "gpt_oss": {
        "model.layers.*.self_attn.q_proj": COLUMNS,
        "model.layers.*.self_attn.k_proj": COLUMNS,
        "model.layers.*.self_attn.v_proj": COLUMNS,
        "model.layers.*.self_attn.o_proj": ROWS,
        "model.layers.*.self_attn.sinks": COLUMNS,
        "model.layers.*.mlp.experts": EXPERTS,
        "model.layers.*.mlp.experts.gate_up_proj": COLUMNS_TRANSPOSED,
        "model.layers.*.mlp.experts.gate_up_proj_bias": COLUMNS_TRANSPOSED,
        "model.layers.*.mlp.experts.down_proj": ROWS_TRANSPOSED,
    },
    "qwen3_vl_text": {
        "model.language_model.layers.*.self_attn.q_proj": COLUMNS,
        "model.language_model.layers.*.self_attn.k_proj": COLUMNS,
        "model.language_model.layers.*.self_attn.v_proj": COLUMNS,
        "model.language_model.layers.*.self_attn.o_proj": ROWS,
        "model.language_model.layers.*.mlp.gate_proj": COLUMNS,
        "model.language_model.layers.*.mlp.up_proj": COLUMNS,
        "model.language_model.layers.*.mlp.down_proj": ROWS,
    },
    "falcon_h1": {
        "model.layers.*.self_attn.q_proj": COLUMNS,
        "model.layers.*.self_attn.k_proj": COLUMNS,
        "model.layers.*.self_attn.v_proj": COLUMNS,
        "model.layers.*.self_attn.o_proj": ROWS,
        "model.layers.*.feed_forward.gate_proj": COLUMNS,
        "model.layers.*.feed_forward.up_proj": COLUMNS,
        "model.layers.*.feed_forward.down_proj": ROWS,
    },
}
"""Plans by model type, for families without one in transformers."""
DIVIDED: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {"transformer.h.*.attn": ("split_size", "num_heads", "embed_dim")}
}
"""Attributes to divide by the number of ranks, by model type and module."""
KEY_VALUE_NAMES = {"k_proj", "v_proj"}
QUERY_NAMES = {"q_proj", "q_b_proj"}
MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The division of a model's modules among ranks.

    Attributes:
        styles: Styles by a module's or parameter's name, with `*` for numbers.
        size: The number of ranks.
        model_type: The model's type.
    """

    styles: Mapping[str, str]
    size: int
    model_type: str

    @property
    def has_whole_experts(self) -> bool:
        """Whether a rank holds some experts whole, instead of a slice of every expert."""
        return WHOLE_EXPERTS in self.styles.values()

    def style_of(self, name: str) -> str | None:
        """Return the style of a module or parameter; None: each rank has the whole."""
        return self.styles.get(_wildcard(name))

    def divided(self, name: str) -> tuple[str, ...]:
        """Return a module's attributes to divide by the number of ranks."""
        return DIVIDED.get(self.model_type, {}).get(_wildcard(name), ())


def _wildcard(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def make_plan(config: PreTrainedConfig, size: int, *, whole_experts: bool = False) -> ShardingPlan:
    """Return the division of a model among `size` ranks.

    Args:
        config: The model's config.
        size: The number of ranks.
        whole_experts: Whether a rank holds some experts whole, instead of a slice of every expert.

    Raises:
        UnsupportedModelError: It cannot be split; the message names the module or possible sizes.
    """
    model = make_text_part(config)
    kind = config.get_text_config(decoder=True).model_type
    styles = _styles(model, kind)
    _refuse_by_name(model, kind, styles)
    if whole_experts:
        styles |= _whole_experts(model, kind, styles)
    if problem := next(_problems(model, styles, size), None):
        fitting = [n for n in range(2, MAX_RANKS + 1) if not any(_problems(model, styles, n))]
        hint = ", ".join(map(str, fitting)) or "none but 1"
        raise UnsupportedModelError(
            f"--tensor-parallel-size {size} does not fit this model: {problem}. Sizes that fit:"
            f" {hint}"
        )
    shared = {
        name
        for path, module in model.named_modules()
        if (name := _wildcard(path)) in styles and _shares_heads(model, path, module, size)
    }
    return ShardingPlan(
        {name: KEYS_VALUES if name in shared else style for name, style in styles.items()},
        size,
        kind,
    )


def _styles(model: PreTrainedModel, kind: str) -> dict[str, str]:
    """Return the plan of a model, including the head and the embeddings.

    Raises:
        UnsupportedModelError: There is none.
    """
    parts = {_wildcard(name) for name, _ in (*model.named_modules(), *model.named_parameters())}
    tp_plan = {
        name: style
        for name, style in (OWN_PLANS.get(kind) or model.tp_plan or {}).items()
        if name in parts  # not of a vision part
    }
    if not tp_plan or set(tp_plan.values()) <= {HEAD, VOCABULARY}:
        raise UnsupportedModelError(
            f"models of the type {kind!r} cannot be split over ranks: transformers has no tp_plan"
            " for them. Use --tensor-parallel-size 1"
        )
    styles = {name: SAME.get(style, style) for name, style in tp_plan.items()}
    for path, module in model.named_modules():
        if isinstance(getattr(module, LATENT_EXPANSION, None), nn.Linear):
            for name, _ in module.named_children():
                styles[f"{_wildcard(path)}.{name}"] = LATENT_STYLES.get(name, WHOLE)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[no-untyped-call]
        names = [path for path, candidate in model.named_modules() if candidate is module]
        styles |= dict.fromkeys(names, VOCABULARY)
    return styles


def _refuse_by_name(model: PreTrainedModel, kind: str, styles: Mapping[str, str]) -> None:
    """Refuse a model with parts that cannot be split yet.

    Raises:
        UnsupportedModelError: The message names it.
    """
    known = STYLES | set(OWN_PLANS.get(kind, {}).values())
    for name, style in styles.items():
        if style not in known:
            raise UnsupportedModelError(
                f"models of the type {kind!r} cannot be split over ranks yet: transformers' plan"
                f" has the style {style!r} for {name}. Use --tensor-parallel-size 1"
            )
    for module in model.modules():
        if (name := type(module).__name__) in METHODS.keys() - SPLITTABLE:
            raise UnsupportedModelError(
                f"models of the type {kind!r} cannot be split over ranks yet: their {name} is"
                " replaced by code that takes all heads. Use --tensor-parallel-size 1"
            )


def _whole_experts(model: PreTrainedModel, kind: str, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the styles of experts' weights if each rank has whole experts.

    Raises:
        UnsupportedModelError: The model has no experts.
    """
    found = {
        _wildcard(f"{path}.{name}"): WHOLE_EXPERTS
        for path, module in model.named_modules()
        if styles.get(_wildcard(path)) == EXPERTS
        for name, _ in module.named_parameters(recurse=False)
    }
    if not found:
        raise UnsupportedModelError(
            f"models of the type {kind!r} have no experts: leave --expert-parallel out"
        )
    if any(type(module).__name__ in SPLITTABLE for module in model.modules()):
        raise UnsupportedModelError(
            f"models of the type {kind!r} run all experts at once: leave --expert-parallel out"
        )
    return found


def _problems(model: nn.Module, styles: Mapping[str, str], size: int) -> Iterator[str]:
    """Yield the reasons why a model cannot be split over `size` ranks."""
    for path, module in model.named_modules():
        style = styles.get(_wildcard(path))
        if style is None:
            yield from _parameter_problems(path, module, styles, size)
            continue
        weight = getattr(module, "weight", None)
        if style in {WHOLE, EXPERTS} or not isinstance(weight, torch.Tensor):
            yield from _parameter_problems(path, module, styles, size)
            continue
        rows, columns = weight.shape[0], weight.shape[-1]
        if style == VOCABULARY:
            if -(-rows // size) * (size - 1) >= rows:
                yield f"its vocabulary has {rows} tokens"
            continue
        if (heads := count_heads(model, path, module)) is not None:
            what = "key and value heads" if _is_keys_values(path) else "heads"
            fits = heads % size == 0 or (_is_keys_values(path) and size % heads == 0)
            if not fits:
                yield f"{_wildcard(path)} has {heads} {what}"
            continue
        count = {
            COLUMNS: rows,
            ROWS: columns,
            PACKED: rows // 2,
            THREE_TRANSPOSED: columns // 3,
            COLUMNS_TRANSPOSED: columns,
            ROWS_TRANSPOSED: rows,
        }[style]
        if style == THREE_TRANSPOSED:
            count = getattr(model.get_submodule(path.rpartition(".")[0]), "num_heads", count)
        if count % size:
            yield f"{_wildcard(path)} has {count} parts"


def _parameter_problems(
    path: str, module: nn.Module, styles: Mapping[str, str], size: int
) -> Iterator[str]:
    """Yield the reasons why a module's own parameters, such as experts', cannot be split."""
    for name, weight in module.named_parameters(recurse=False):
        full = _wildcard(f"{path}.{name}")
        style = styles.get(full)
        if style is None or weight.dim() < 2:
            continue
        if style == WHOLE_EXPERTS and len(weight) % size:
            yield f"{full} has {len(weight)} experts"
        count = {
            COLUMNS: weight.shape[-2],
            ROWS: weight.shape[-1],
            PACKED: weight.shape[-2] // 2,
            PACKED_TRANSPOSED: weight.shape[-1] // 2,
            COLUMNS_TRANSPOSED: weight.shape[-1] // 2,
            ROWS_TRANSPOSED: weight.shape[-2],
        }
        if style in count and count[style] % size:
            yield f"{full} has {count[style]} parts"


def _is_keys_values(path: str) -> bool:
    return path.rpartition(".")[2] in KEY_VALUE_NAMES


def count_heads(model: nn.Module, path: str, module: nn.Module) -> int | None:
    """Return the number of heads of a projection; None if it is not part of attention."""
    parent, _, name = path.rpartition(".")
    if name not in QUERY_NAMES | KEY_VALUE_NAMES or not isinstance(module, nn.Linear):
        return None
    attention: Any = model.get_submodule(parent)
    head_dim, width = getattr(attention, "head_dim", None), module.out_features
    if not isinstance(head_dim, int):
        head_dim = getattr(attention, "qk_head_dim", None)
    elif name in QUERY_NAMES:
        width = min(width, attention.o_proj.in_features)  # without gates
    return width // head_dim if isinstance(head_dim, int) else None


def _shares_heads(model: nn.Module, path: str, module: nn.Module, size: int) -> bool:
    """Return whether several ranks share a head of a projection of keys or values."""
    if not _is_keys_values(path):
        return False
    heads = count_heads(model, path, module)
    return heads is not None and heads % size != 0
