"""Search for tile sizes that are faster on this GPU than the rules' sizes."""

import itertools
import json
from dataclasses import asdict

import torch
from rich.console import Console

from benchmarks.gpu.shapes import LLAMA_3_8B, LLAMA_7B, SMOLLM2, Batch, Layout, make_batch, replan
from benchmarks.gpu.timing import Timer
from octavo.kernels.gpu import describe_gpu
from octavo.kernels.triton.tiles import (
    TUNED,
    Heads,
    Tiles,
    WorkKind,
    choose_tiles,
    tuning_key,
    use_tiles,
)

RUNS = 10
MIN_GAIN = 0.02
"""Minimum share of time that a choice must save to be kept: more than noise."""
CASES: list[tuple[WorkKind, Layout, list[tuple[int, int]], torch.dtype | None]] = [
    ("decode", LLAMA_3_8B, [(1, 2048)] * 64, None),
    ("decode", LLAMA_7B, [(1, 2048)] * 32, None),
    ("decode", SMOLLM2, [(1, 1024)] * 128, None),
    ("decode", LLAMA_3_8B, [(1, 2048)] * 64, torch.float8_e5m2),
    ("chunk", LLAMA_3_8B, [(4096, 4096)] * 2, None),
    ("chunk", SMOLLM2, [(2048, 2048)] * 4, None),
]
CHUNKS = [
    Tiles(rows, keys, warps, stages)
    for rows, keys, warps, stages in (
        *((128, 64, 8, stages) for stages in (2, 3, 4)),
        *((128, 128, 8, stages) for stages in (2, 3)),
        *((128, 32, 8, 4), (128, 64, 4, 3)),
        *((64, keys, 4, stages) for keys in (64, 128) for stages in (2, 3)),
    )
]


def tune(device: torch.device, console: Console) -> None:
    """Time choices for each case; write those that beat the rules to tuned.json."""
    timer = Timer(device, runs=RUNS)
    kept = json.loads(TUNED.read_text()) if TUNED.exists() else {}
    for kind, layout, lengths, cache_dtype in CASES:
        batch = make_batch(layout, lengths, device, cache_dtype=cache_dtype)
        gpu, dim = describe_gpu(device), layout.head_dim
        heads = Heads(layout.num_heads // layout.num_kv_heads, dim, dim)
        dtypes = {"dtype": batch.query.dtype, "cache_dtype": batch.cache_dtype}
        key = tuning_key(kind, gpu, heads, **dtypes)
        use_tiles(key, None)
        rule = choose_tiles(kind, gpu, heads, **dtypes)
        choices = [rule, *(_decodes(rule) if kind == "decode" else CHUNKS)]
        times: dict[Tiles, float] = {}
        for tiles in choices:
            use_tiles(key, tiles)
            if (seconds := _time(replan(batch, layout, lengths), timer)) is not None:
                times[tiles] = seconds
        best = min(times, key=lambda tiles: times[tiles])
        for tiles in (rule, best):
            console.print(f"{key}: {times[tiles] * 1e6:,.0f} us with {tiles}")
        kept.pop(key, None)
        if times[best] < (1 - MIN_GAIN) * times[rule]:
            kept[key] = asdict(best)
        use_tiles(key, None)
        TUNED.write_text(json.dumps(kept, indent=1) + "\n")


def _decodes(rule: Tiles) -> list[Tiles]:
    sizes = itertools.product((32, 64, 128), (2, 4, 8), (3, 5))
    return [Tiles(rule.rows, keys, warps, stages) for keys, warps, stages in sizes]


def _time(batch: Batch, timer: Timer) -> float | None:
    """Return the seconds; None if the tiles do not fit on the GPU."""
    try:
        return timer.time_recorded(batch.attend_all, calls=len(batch.caches))
    except Exception:  # noqa: BLE001 - Triton has many ways to say so
        return None
