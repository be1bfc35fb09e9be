"""The parts of the benchmark; each runs in its own process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu import peers
from benchmarks.gpu.result import Row
from benchmarks.gpu.sampling import time_sampling
from benchmarks.gpu.shapes import (
    BLOCK_SIZE,
    LLAMA_3_8B,
    LLAMA_7B,
    LLAMA_13B,
    QWEN3_8B,
    SMOLLM2,
    Batch,
    Layout,
    make_batch,
)
from benchmarks.gpu.steps import time_steps
from benchmarks.gpu.timing import Timer
from octavo.kernels import ops
from octavo.kernels.gpu import describe_gpu

Work = Callable[[Timer, bool], list[Row]]
ERROR_ALLOWED = 0.02
"""Maximum difference of bfloat16 results, relative to the largest value."""


def measure_device(timer: Timer, tiny: bool) -> list[Row]:
    """Time the device's peak rates: copies and matrix products."""
    device = timer.device
    source = torch.empty((1 if tiny else 1024) << 20, dtype=torch.uint8, device=device)
    source.random_()
    target = torch.empty_like(source)
    rows = [
        Row("copy", timer.time(lambda: target.copy_(source)), moved=2 * source.nbytes),
    ]
    size = 64 if tiny else 8192
    a, b = (torch.randn((size, size), dtype=torch.bfloat16, device=device) for _ in range(2))
    rows.append(Row("matmul bfloat16", timer.time(lambda: a @ b), flops=2.0 * size**3))
    return rows


def time_decode(timer: Timer, tiny: bool) -> list[Row]:
    """Time decodes: one query per sequence."""
    cases: list[tuple[Layout, int, int, torch.dtype | None]] = [
        (LLAMA_7B, 64, 2048, None),
        (LLAMA_7B, 4, 32768, None),
        (LLAMA_3_8B, 64, 2048, None),
        (LLAMA_3_8B, 4, 32768, None),
        (LLAMA_3_8B, 1, 32768, None),
        (LLAMA_13B, 32, 2048, None),
        (QWEN3_8B, 256, 1024, None),
        (SMOLLM2, 128, 1024, None),
    ]
    if timer.device.type == "cuda":
        cases += [
            (LLAMA_3_8B, 64, 2048, torch.float8_e5m2),
            (LLAMA_3_8B, 4, 32768, torch.float8_e5m2),
        ]
        e4m3 = describe_gpu(timer.device).e4m3
        if e4m3 is not None:
            cases.append((LLAMA_3_8B, 64, 2048, e4m3))
    rows = []
    for layout, count, context, cache_dtype in cases[:3:2] if tiny else cases:
        count, context = (2, 48) if tiny else (count, context)  # noqa: PLW2901
        batch = make_batch(layout, [(1, context)] * count, timer.device, cache_dtype=cache_dtype)
        case = f"{layout.model} {count} x {context}"
        if cache_dtype is not None:
            case += " " + str(cache_dtype).removeprefix("torch.float8_")
        moved = 2 * batch.key.numel() * _item(batch)
        flops = 4.0 * count * context * layout.num_heads * layout.head_dim
        row = _compare(case, batch, timer, moved=moved, flops=flops, num_layers=layout.num_layers)
        if cache_dtype is None and timer.device.type == "cuda":
            times, notes = peers.time_paged(batch, timer)
            row.peers.update(times)
            row.notes.extend(notes)
        rows.append(row)
        del batch  # free it before the next batch
    return rows


def time_prefill(timer: Timer, tiny: bool) -> list[Row]:
    """Time prompts: every token is a query."""
    rows = []
    for layout in (LLAMA_3_8B,) if tiny else (LLAMA_7B, LLAMA_3_8B, SMOLLM2):
        count, length = (2, 24) if tiny else (4, 4096)
        batch = make_batch(layout, [(length, length)] * count, timer.device)
        flops = 4.0 * count * layout.num_heads * layout.head_dim * length * (length + 1) / 2
        moved = sum(x.nbytes for x in (batch.query, batch.query, batch.key, batch.value))
        case = f"{layout.model} {count} x {length}"
        row = _compare(case, batch, timer, moved=moved, flops=flops, num_layers=layout.num_layers)
        rows.append(row)
        del batch  # free it before the next batch
    return rows


def time_mixed(timer: Timer, tiny: bool) -> list[Row]:
    """Time decodes and a chunk of a prompt in one step, beside each alone."""
    layout = LLAMA_3_8B
    decodes = [(1, 40 if tiny else 2048)] * (2 if tiny else 63)
    chunk = [(16, 32)] if tiny else [(1024, 4096)]
    rows = []
    for case, lengths in (
        (f"{len(decodes)} decodes", decodes),
        (f"a chunk of {chunk[0][0]}", chunk),
        ("both in a step", decodes + chunk),
    ):
        batch = make_batch(layout, lengths, timer.device)
        seconds = timer.time_recorded(batch.attend_all, calls=len(batch.caches))
        rows.append(Row(f"{layout.model} {case}", seconds))
        del batch  # free it before the next batch
    return rows


def time_cache(timer: Timer, tiny: bool) -> list[Row]:
    """Time writes to the cache, and copies of blocks within it."""
    rows = []
    layout = LLAMA_3_8B
    tokens = 64 if tiny else 8192
    shape = (tokens, layout.num_kv_heads, layout.head_dim)
    key, value = (torch.randn(shape, dtype=torch.bfloat16, device=timer.device) for _ in range(2))
    shape = (tokens // BLOCK_SIZE, 2, layout.num_kv_heads, BLOCK_SIZE, layout.head_dim)
    cache = torch.empty(shape, dtype=torch.bfloat16, device=timer.device)
    slots = torch.randperm(tokens, device=timer.device)
    rows.append(
        Row(
            f"{layout.model} write {tokens} tokens",
            timer.time_recorded(lambda: ops.write_kv(key, value, cache[:, 0], cache[:, 1], slots)),
            moved=4 * key.nbytes,
        )
    )
    if timer.device.type == "cuda":
        rows += _time_rotation(layout, tokens, timer)
    blocks = 8 if tiny else 512
    shape = (blocks, layout.num_layers, 2, layout.num_kv_heads, BLOCK_SIZE, layout.head_dim)
    cache = torch.randn(shape, dtype=torch.bfloat16, device=timer.device)
    pairs = torch.randperm(blocks).view(-1, 2)
    rows.append(
        Row(
            f"{layout.model} copy {len(pairs)} blocks",
            timer.time(lambda: ops.copy_blocks(cache, pairs)),
            moved=2 * len(pairs) * cache[0].nbytes,
        )
    )
    return rows


def _time_rotation(layout: Layout, tokens: int, timer: Timer) -> list[Row]:
    """Time rotary embedding and write in one kernel, and both separately, eager and compiled."""
    from octavo.kernels.triton import rotate_and_write  # noqa: PLC0415 - absent without a GPU

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=timer.device)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]

    query = numbers(tokens, layout.num_heads, layout.head_dim)
    key, value = numbers(2, tokens, layout.num_kv_heads, layout.head_dim)
    cos, sin = numbers(2, tokens, layout.head_dim)
    blocks = tokens // BLOCK_SIZE
    cache = numbers(blocks, 2, layout.num_kv_heads, BLOCK_SIZE, layout.head_dim)
    caches = cache[:, 0], cache[:, 1]
    slots = torch.randperm(tokens, device=timer.device)

    def together() -> None:
        rotate_and_write(query, key, value, cos, sin, *caches, slots)

    def apart(rotate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        rotate(query)
        ops.write_kv(rotate(key), value, *caches, slots)

    peers_seconds = {
        "apart": timer.time_recorded(partial(apart, rotate)),
        "apart, compiled": timer.time_recorded(partial(apart, torch.compile(rotate, dynamic=True))),
    }
    moved = 2 * (query.nbytes + 2 * key.nbytes) + 2 * cos.nbytes
    case = f"{layout.model} rotate and write {tokens} tokens"
    return [Row(case, timer.time_recorded(together), moved, peers=peers_seconds)]


def time_swap(timer: Timer, tiny: bool) -> list[Row]:
    """Time swaps of blocks to host memory and back, and one plain copy of the same size."""
    from octavo.engine.memory.pinned import pin  # noqa: PLC0415 - needs more than kernels do
    from octavo.engine.memory.swap import make_swapper  # noqa: PLC0415 - needs more than kernels do

    layout = LLAMA_3_8B
    blocks = 8 if tiny else 256
    on_gpu = timer.device.type == "cuda"
    shape = (blocks, layout.num_layers, 2, layout.num_kv_heads, BLOCK_SIZE, layout.head_dim)
    cache = torch.zeros(shape, dtype=torch.bfloat16, device=timer.device)
    space = torch.zeros(shape, dtype=torch.bfloat16)
    swapper = make_swapper(cache, space)
    if on_gpu:
        pin(space, owner=swapper)

    def copy(target: torch.Tensor, source: torch.Tensor) -> float:
        return timer.time_whole(lambda: target.copy_(source, non_blocking=on_gpu))

    whole = {"out": copy(space, cache), "in": copy(cache, space)}
    rows = []
    for order, places in (
        ("in order", list(range(blocks))),
        ("anywhere", torch.randperm(blocks).tolist()),
    ):
        out = list(enumerate(places))
        back = [(place, block) for block, place in out]
        for way, work in (
            ("out", partial(swapper.swap_out, out)),
            ("in", partial(swapper.swap_in, back)),
        ):
            case = f"{layout.model} {way}, {blocks} blocks {order}"
            seconds = timer.time_whole(work)
            rows.append(Row(case, seconds, cache.nbytes, peers={"one copy": whole[way]}))
    return rows


def _item(batch: Batch) -> int:
    return batch.cache_dtype.itemsize


def _compare(
    case: str, batch: Batch, timer: Timer, *, moved: int, flops: float, num_layers: int
) -> Row:
    """Time the kernels and PyTorch's attention, and compare their results.

    Raises:
        ArithmeticError: Results differ by more than bfloat16 explains.
    """
    attended = batch.attend()
    times, output, notes = peers.time_contiguous(batch, timer)
    error = None
    if output is not None:
        expected = output.transpose(1, 2).flatten(0, 1).float()
        error = float((attended.float() - expected).abs().max() / expected.abs().max())
        allowed = ERROR_ALLOWED if _item(batch) > 1 else 10 * ERROR_ALLOWED
        if not error <= allowed:
            raise ArithmeticError(f"{case}: the kernels are {error:.2g} off PyTorch's attention")
    layers = len(batch.caches)
    if layers < num_layers:
        notes.append(f"{case}: there is memory for {layers} of {num_layers} layers")
    seconds = timer.time_recorded(batch.attend_all, calls=layers)
    return Row(case, seconds, moved, flops, error, times, notes)


@dataclass(frozen=True, slots=True)
class Part:
    """A part: its function, and its time limit in seconds."""

    work: Work
    seconds: int


PARTS = {
    "device": Part(measure_device, 30),
    "decode": Part(time_decode, 80),
    "prefill": Part(time_prefill, 50),
    "mixed": Part(time_mixed, 30),
    "cache": Part(time_cache, 30),
    "swap": Part(time_swap, 30),
    "sampling": Part(time_sampling, 25),
    "steps": Part(time_steps, 70),
}
TEST_SECONDS = 420
"""Time limit of the tests, which come first. All parts together take under 13 minutes."""
