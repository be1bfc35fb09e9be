"""Compiles the kernels for GPUs that this machine lacks: Triton includes the assemblers."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from octavo.kernels.gpu import Gpu
from octavo.kernels.low_rank import RECORD, TILE_ROWS
from octavo.kernels.quantized import Numbers, QuantizedWeight, make_weight
from octavo.kernels.triton.attention_kernel import paged_attention_kernel
from octavo.kernels.triton.copy_blocks import _swap_blocks_kernel
from octavo.kernels.triton.draw_tokens import _INFINITY, _TILE, _draw_tokens_kernel, warps_on
from octavo.kernels.triton.expert_rows import SUM_COLUMNS, _sum_kernel
from octavo.kernels.triton.experts import _down_kernel, _up_kernel, choose_expert_tiles
from octavo.kernels.triton.fp8_linear import _round_rows_kernel
from octavo.kernels.triton.low_rank import COLUMNS, DEPTH, RANKS
from octavo.kernels.triton.low_rank import _down_kernel as low_rank_down
from octavo.kernels.triton.low_rank import _up_kernel as low_rank_up
from octavo.kernels.triton.mask_logits import _TOKENS, _WORD_BITS, _mask_logits_kernel
from octavo.kernels.triton.merge_splits import merge_splits
from octavo.kernels.triton.paged_attention import (
    _operands,
    merged_at_once,
    small_tile,
)
from octavo.kernels.triton.quantized_experts import _down_kernel as quantized_down
from octavo.kernels.triton.quantized_experts import _up_kernel as quantized_up
from octavo.kernels.triton.quantized_linear import (
    DEQUANTIZED_COLUMNS,
    MERGED_COLUMNS,
    _dequantize_kernel,
    _linear_kernel,
    _merge_kernel,
)
from octavo.kernels.triton.rotate_and_write import _rotate_and_write_kernel
from octavo.kernels.triton.tiles import Heads, Tiles, WorkKind, choose_tiles
from octavo.kernels.triton.unpack import UnpackedTiles, choose_unpacked_tiles, constants_of
from octavo.kernels.triton.write_kv import _write_codes_kernel, _write_kv_kernel, warps_for
from octavo.kernels.whole_numbers import SCALE_BYTES

KIB = 1024
A100 = Gpu("A100", "sm_80", 32, 163 * KIB, 108)
RTX_3090 = Gpu("RTX 3090", "sm_86", 32, 99 * KIB, 82)
RTX_4090 = Gpu("RTX 4090", "sm_89", 32, 99 * KIB, 128)
H100 = Gpu("H100", "sm_90", 32, 227 * KIB, 132)
B200 = Gpu("B200", "sm_100", 32, 227 * KIB, 148)
RTX_5090 = Gpu("RTX 5090", "sm_120", 32, 99 * KIB, 170)
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E4M3FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
INT8 = torch.int8
CACHES = ("key_cache", "value_cache")


@dataclass(frozen=True)
class Shape:
    """A configuration to compile attention for."""

    group: int = 4
    head_dim: int = 128  # dtype of queries and keys
    value_dim: int | None = None  # the keys' if None
    latent: bool = False
    dtype: torch.dtype = BF16
    cache_dtype: torch.dtype = BF16
    block_size: int = 16
    features: str = ""
    small_cache: bool = False  # less than 2 GiB: AMD's GPUs then use shorter addresses

    @property
    def heads(self) -> Heads:
        """The heads that determine the tiles."""
        return Heads(self.group, self.head_dim, self.value_dim or self.head_dim, self.latent)


COMMON = Shape()
LATENT = Shape(group=16, head_dim=576, value_dim=512, latent=True)
VARIANTS = [
    Shape(group=1),
    Shape(group=7, head_dim=64),
    Shape(block_size=8),
    Shape(block_size=256),
    Shape(features="window"),
    Shape(features="window cap alibi"),
    Shape(head_dim=80),
    Shape(head_dim=256, features="window cap"),
    Shape(head_dim=32),
    Shape(group=71, head_dim=64),
    Shape(cache_dtype=E5M2),
    Shape(cache_dtype=INT8),
    Shape(group=3, head_dim=64, cache_dtype=INT8, block_size=256),
    Shape(dtype=FP32, cache_dtype=FP32, features="window"),
    Shape(dtype=FP32, cache_dtype=FP32, head_dim=256),
    Shape(dtype=FP16, cache_dtype=FP16),
    Shape(features="chunk sinks"),
    Shape(head_dim=8),
    Shape(head_dim=192, value_dim=128),
    Shape(group=8, head_dim=512),
    LATENT,
    replace(LATENT, group=128),
    replace(LATENT, cache_dtype=E5M2),
    Shape(dtype=FP32, cache_dtype=FP32, group=8, head_dim=512),
    Shape(group=40, head_dim=288, value_dim=256, latent=True),
]


def compile_for(
    gpu: Gpu,
    kernel: triton.JITFunction,
    types: dict[str, str],
    constants: dict[str, Any],
    *,
    aligned: tuple[str, ...] = (),
    warps: int = 4,
    stages: int = 2,
    large: tuple[str, ...] = CACHES,
) -> CompiledKernel:
    """Compile a kernel whose arguments are i32 except `types` and `constants`.

    Tensors not in `large` have less than 2 GiB, which matters to Triton for AMD's GPUs.
    """
    names = kernel.arg_names
    signature = dict.fromkeys(names, "i32") | types | dict.fromkeys(constants, "constexpr")
    attributes = {name: [["tt.divisibility", 16]] for name in aligned}
    if gpu.is_amd:
        for name in types.keys() - set(large):
            if signature[name].startswith("*"):
                attributes[name] = [*attributes.get(name, []), ["tt.pointer_range", 32]]
    source = ASTSource(
        kernel,
        {name: signature[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): value for name, value in attributes.items()},
    )
    if gpu.is_amd:
        target = GPUTarget("hip", gpu.arch, gpu.warp_size)
    else:
        target = GPUTarget("cuda", int(gpu.arch.removeprefix("sm_")), gpu.warp_size)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target, options)


def compile_attention(gpu: Gpu, kind: str, shape: Shape) -> tuple[CompiledKernel, Tiles]:
    """Compile attention with a GPU's tiles; return the tiles, too."""
    dtype, cache_dtype, heads = shape.dtype, shape.cache_dtype, shape.heads
    tiles = choose_tiles(kind, gpu, heads, dtype=dtype, cache_dtype=cache_dtype)
    types = dict.fromkeys(("query", "out"), "*" + NAMES[dtype])
    types |= dict.fromkeys(CACHES, "*" + NAMES[cache_dtype])
    types |= dict.fromkeys(("partial_out", "partial_lse", "alibi_slopes", "sinks"), "*fp32")
    types |= dict.fromkeys(("items", "query_starts", "seq_lens", "block_tables"), "*i32")
    types |= dict.fromkeys(("factor", "value_scale", "soft_cap"), "fp32")
    aligned = ("query", "out", *CACHES, "block_tables")
    strides = ("query_token_stride", "query_head_stride", "key_stride", "value_stride")
    constants = {
        "DTYPE": _operands(dtype, cache_dtype),
        "NUM_HEADS": 8 * heads.group,
        "GROUP": heads.group,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
        "MAIN": heads.main,
        "PADDED_MAIN": heads.padded_main,
        "PADDED_REST": heads.padded_rest,
        "PADDED_VALUE": heads.padded_value,
        "LATENT": heads.latent,
        "SAME_PLACES": heads.key_dim == heads.value_dim,
        "SCALE_BYTES": SCALE_BYTES if cache_dtype == INT8 else 0,
        "BLOCK_SIZE": shape.block_size,
        "ROWS": tiles.rows,
        "PARTIAL_ROWS": min(tiles.rows, heads.group),
        "KEYS": tiles.keys,
        "MIN_TILES": 4,
        "HAS_SPAN": "window" in shape.features or "chunk" in shape.features,
        "CHUNKED": "chunk" in shape.features,
        "HAS_CAP": "cap" in shape.features,
        "HAS_ALIBI": "alibi" in shape.features,
        "HAS_SINKS": "sinks" in shape.features,
        "LOG2_E": 1.44,
        "SMALL": small_tile(gpu),
        "UPCAST": False,
    }
    made = compile_for(
        gpu,
        paged_attention_kernel,
        types,
        constants,
        aligned=aligned + strides,
        warps=tiles.warps,
        stages=tiles.stages,
        large=() if shape.small_cache else CACHES,
    )
    return made, tiles


def compile_linear(
    gpu: Gpu, weight: QuantizedWeight, rows: int, dtype: torch.dtype = BF16
) -> tuple[CompiledKernel, UnpackedTiles]:
    """Compile a product with quantized weights of 4,096 inputs; return its tiles, too."""
    tiles = choose_unpacked_tiles(gpu, rows, weight, dtype)
    types, constants = _of_weight(weight)
    types |= {"x": "*" + NAMES[dtype], "out": "*fp32"}
    constants |= {"ROWS": tiles.rows, "COLUMNS": tiles.columns}
    constants |= {"HAS_BIAS": False, "UPCAST": False, "bias": None}
    made = compile_for(
        gpu,
        _linear_kernel,
        types,
        constants,
        aligned=(*types, "inputs", "outputs", "row_stride"),
        warps=tiles.warps,
        stages=tiles.stages,
    )
    return made, tiles


def compile_quantized_experts(
    gpu: Gpu, weight: QuantizedWeight, rows: int, dtype: torch.dtype = BF16
) -> list[tuple[CompiledKernel, UnpackedTiles]]:
    """Compile both products of 128 experts; return their tiles, too."""
    tiles = choose_unpacked_tiles(gpu, rows, weight, dtype)
    types, constants = _of_weight(weight)
    types |= {"order": "*i64", "starts": "*i32", "shares": "*fp32"}
    types |= dict.fromkeys(("x", "between", "bias"), "*" + NAMES[dtype])
    constants |= {"NUM_EXPERTS": 128, "PADDED": 128, "UPCAST": False, "HAS_BIAS": True}
    constants |= {"ROWS": tiles.rows, "COLUMNS": tiles.columns}
    gated = {"CHOSEN": 8, "GATED": True, "ACTIVATION": 0, "ALPHA": 1.702, "LIMIT": 7.0}
    made = []
    for kernel, own, out in (
        (quantized_up, gated | {"OFFSET": 1.0}, NAMES[dtype]),
        (quantized_down, {}, "fp32"),
    ):
        names = kernel.arg_names
        kinds = {name: kind for name, kind in types.items() if name in names} | {"out": "*" + out}
        sizes = ("hidden", "inner", "outputs", "row_stride")
        aligned = tuple(name for name in (*kinds, *sizes) if name in names)
        launch = {"warps": tiles.warps, "stages": tiles.stages, "large": ("codes",)}
        compiled = compile_for(gpu, kernel, kinds, constants | own, aligned=aligned, **launch)
        made.append((compiled, tiles))
    return made


def _of_weight(weight: QuantizedWeight) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the types of a weight's tensors, and the constants, including absent tensors."""
    words = {torch.float32: "*fp32", torch.int32: "*i32"}
    tensors = {name: getattr(weight, name) for name in ("codes", "scale", "more", "outer")}
    types = {name: words[own.dtype] for name, own in tensors.items() if own is not None}
    return types, constants_of(weight) | dict.fromkeys(tensors.keys() - types.keys())


def compile_beside_products(gpu: Gpu) -> list[CompiledKernel]:
    """Compile the kernels that add slices up, dequantize, and round rows to fp8."""
    weight = make_weight(
        torch.zeros((64, 256), dtype=torch.uint8),
        torch.ones((64, 2)),
        group=128,
        numbers=Numbers.NIBBLES,
        zero_point=8,
    )
    merging = {"parts": "*fp32", "bias": "*bf16", "out": "*bf16"}
    columns = {"COLUMNS": MERGED_COLUMNS}
    made = [compile_for(gpu, _merge_kernel, merging, columns | {"HAS_BIAS": True})]
    types = {"codes": "*i32", "scale": "*i32", "out": "*bf16"}
    constants = constants_of(weight) | {"COLUMNS": DEQUANTIZED_COLUMNS, "more": None, "outer": None}
    made.append(compile_for(gpu, _dequantize_kernel, types, constants, aligned=tuple(types)))
    if gpu.e4m3 == E4M3:
        types = {"x": "*bf16", "out": "*fp8e4nv", "scales": "*fp32"}
        constants = {"LARGEST": 448.0, "MIN_SCALE": 1e-12, "COLUMNS": 1024}
        made.append(compile_for(gpu, _round_rows_kernel, types, constants, aligned=tuple(types)))
    return made


def compile_merges(gpu: Gpu, dim: int = 128) -> list[CompiledKernel]:
    """Compile the merges of decodes' and chunks' pieces, with values of `dim` elements."""
    types = {"out": "*bf16"} | dict.fromkeys(("partial_out", "partial_lse", "sinks"), "*fp32")
    types |= dict.fromkeys(("items", "query_starts", "seq_lens"), "*i32")
    constants: dict[str, Any] = {"NUM_HEADS": 32, "GROUP": 4, "VALUE_DIM": dim}
    constants |= {"PADDED_VALUE": dim, "ROWS": 16, "PARTIAL_ROWS": 16, "KEYS": 64}
    constants |= {"MIN_TILES": 4, "HAS_SPAN": True, "CHUNKED": False, "HAS_SINKS": True}
    kinds: tuple[WorkKind, ...] = ("decode", "chunk")
    sizes = [merged_at_once(kind, Heads(4, dim, dim)) for kind in kinds]
    return [
        compile_for(
            gpu,
            merge_splits,
            types,
            constants | {"LOG2_E": 1.44, "MERGED_ROWS": rows, "PIECES": pieces},
        )
        for rows, pieces in sizes
    ]


def compile_write(gpu: Gpu, cache_dtype: torch.dtype) -> CompiledKernel:
    """Compile the writes of a token's keys and values to the cache."""
    types = dict.fromkeys(("key", "value"), "*bf16") | {"slot_mapping": "*i64"}
    types |= dict.fromkeys(CACHES, "*" + NAMES[cache_dtype])
    types |= dict.fromkeys(("key_scale", "value_scale"), "fp32")
    largest = torch.finfo(cache_dtype).max
    constants = {"NUM_KV_HEADS": 3, "KEY_DIM": 80, "VALUE_DIM": 80, "LARGEST": largest}
    constants |= {"PADDED_KEYS": 256, "PADDED_VALUES": 256}
    return compile_for(gpu, _write_kv_kernel, types, constants, warps=warps_for(256, gpu))


def compile_code_write(gpu: Gpu, dtype: torch.dtype) -> CompiledKernel:
    """Compile the writes of a token's keys or values to a cache of whole numbers."""
    types = {"x": "*" + NAMES[dtype], "cache": "*" + NAMES[INT8], "slot_mapping": "*i64"}
    constants = {"HEADS": 3, "DIM": 80, "SCALE_BYTES": SCALE_BYTES}
    constants |= {"PADDED_HEADS": 4, "PADDED_DIM": 128}
    warps = warps_for(4 * 128, gpu)
    return compile_for(gpu, _write_codes_kernel, types, constants, warps=warps, large=("cache",))


def compile_rotation(gpu: Gpu) -> CompiledKernel:
    """Compile the kernel that rotates and writes a token's heads."""
    pointers = ("query", "key", "value", "out", "cos", "sin", *CACHES)
    types = dict.fromkeys(pointers, "*bf16") | {"slot_mapping": "*i64"}
    types |= dict.fromkeys(("key_scale", "value_scale"), "fp32")
    constants = {"NUM_HEADS": 9, "NUM_KV_HEADS": 3, "KEY_DIM": 80, "VALUE_DIM": 80}
    constants |= {"PADDED_HEADS": 16, "PADDED_KV_HEADS": 4, "PADDED_HALF": 64}
    constants |= {"PADDED_VALUE_HALF": 64, "LARGEST": 3e38}
    warps = warps_for(16 * 64, gpu)
    return compile_for(gpu, _rotate_and_write_kernel, types, constants, warps=warps)


def compile_copies(gpu: Gpu) -> CompiledKernel:
    """Compile the block copies."""
    types = dict.fromkeys(("source", "destination"), "*i32")
    types |= dict.fromkeys(("source_blocks", "destination_blocks"), "*i64")
    return compile_for(gpu, _swap_blocks_kernel, types, {"WORDS": 1024})


def compile_wide_writes(gpu: Gpu, dtype: torch.dtype) -> list[CompiledKernel]:
    """Compile rotation and writes for models' numbers of heads."""
    name, heads = "*" + NAMES[dtype], 128
    scales = dict.fromkeys(("key_scale", "value_scale"), "fp32") | {"slot_mapping": "*i64"}
    pointers = ("query", "key", "value", "cos", "sin", "out", *CACHES)
    types = dict.fromkeys(pointers, name) | scales
    constants = {"KEY_DIM": 128, "VALUE_DIM": 128, "NUM_KV_HEADS": heads, "LARGEST": 3e38}
    padded = {"PADDED_HEADS": heads, "PADDED_KV_HEADS": heads}
    padded |= {"PADDED_HALF": 64, "PADDED_VALUE_HALF": 64}
    rotating = constants | {"NUM_HEADS": heads} | padded
    writing = constants | {"PADDED_KEYS": heads * 128, "PADDED_VALUES": heads * 128}
    made = []
    for kernel, given, elements in (
        (_rotate_and_write_kernel, rotating, heads * 64),
        (_write_kv_kernel, writing, heads * 128),
    ):
        kinds = {key: types[key] for key in types if key in kernel.arg_names}
        strides = [key for key in kernel.arg_names if key.endswith("stride")]
        aligned = (*(key for key in kinds if key in pointers), *strides)
        warps = warps_for(elements, gpu)
        made.append(compile_for(gpu, kernel, kinds, given, aligned=aligned, warps=warps))
    return made


def compile_draws(gpu: Gpu) -> CompiledKernel:
    """Compile the sampling of tokens."""
    return compile_for(
        gpu,
        _draw_tokens_kernel,
        {"logits": "*fp32", "draws": "*fp64", "out": "*i64"},
        {"TILE": _TILE, "INFINITY": _INFINITY},
        aligned=("logits", "vocab_size"),
        warps=warps_on(gpu),
    )


def compile_masks(gpu: Gpu, dtype: torch.dtype = FP32) -> CompiledKernel:
    """Compile the masking of logits."""
    return compile_for(
        gpu,
        _mask_logits_kernel,
        {"logits": "*" + NAMES[dtype], "rows": "*i64", "masks": "*i32"},
        {"TOKENS": _TOKENS, "WORD_BITS": _WORD_BITS},
        aligned=("logits", "rows", "masks", "row_stride", "vocab_size"),
    )


def compile_low_rank(gpu: Gpu, dtype: torch.dtype = BF16) -> list[CompiledKernel]:
    """Compile both low-rank products."""
    types = {"rows": "*i32", "tiles": "*i32", "records": "*i64", "inner": "*fp32"}
    types |= dict.fromkeys(("x", "out"), "*" + NAMES[dtype])
    shared = {"ROWS": TILE_ROWS, "RANKS": RANKS, "RECORD": RECORD}
    made = []
    for kernel, own, size in (
        (low_rank_down, {"DEPTH": DEPTH, "UPCAST": False}, "inputs"),
        (low_rank_up, {"COLUMNS": COLUMNS}, "outputs"),
    ):
        kinds = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        aligned = (*kinds, size, "row_stride")
        made.append(compile_for(gpu, kernel, kinds, shared | own, aligned=aligned))
    return made


def compile_experts(gpu: Gpu, rows: int, dtype: torch.dtype = BF16) -> list[CompiledKernel]:
    """Compile both products of 128 experts, with the tiles for `rows` rows each."""
    tiles = choose_expert_tiles(gpu, rows)
    shared = {"NUM_EXPERTS": 128, "PADDED": 128, "UPCAST": False, "HAS_BIAS": True}
    shared |= {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth}
    gated = {"CHOSEN": 8, "GATED": True, "KIND": 0, "ALPHA": 1.702, "LIMIT": 7.0, "OFFSET": 1.0}
    types = {"order": "*i64", "starts": "*i32", "shares": "*fp32"}
    types |= dict.fromkeys(("x", "between", "weights", "bias"), "*" + NAMES[dtype])
    sizes = ("hidden", "inner", "row_stride", "expert_stride", "output_stride")
    made = []
    for kernel, own, out in (
        (_up_kernel, shared | gated, NAMES[dtype]),
        (_down_kernel, shared, "fp32"),
    ):
        names = kernel.arg_names
        kinds = {name: kind for name, kind in types.items() if name in names} | {"out": "*" + out}
        aligned = [name for name in (*kinds, *sizes) if name in names]
        made.append(
            compile_for(
                *(gpu, kernel, kinds, own | {"input_stride": 1}),
                aligned=tuple(aligned),
                warps=tiles.warps,
                stages=tiles.stages,
                large=("weights",),
            )
        )
    return made


def compile_sum(gpu: Gpu) -> CompiledKernel:
    """Compile the sum of a row's experts."""
    types = {"pairs": "*fp32", "expert_ids": "*i64", "out": "*bf16"}
    return compile_for(gpu, _sum_kernel, types, {"CHOSEN": 8, "COLUMNS": SUM_COLUMNS})
