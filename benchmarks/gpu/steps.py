"""Time whole decode steps of an engine: model, sampling, scheduling and other Python."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.random_model import save_llama, tiny_layout
from benchmarks.gpu.result import Row
from benchmarks.gpu.shapes import BLOCK_SIZE, LLAMA_7B
from benchmarks.gpu.timing import Timer

LAYERS = 8
"""Number of layers instead of LLaMA-7B's 32, so that Python's time shows."""
SEQUENCES, PROMPT = 64, 512
WARM_STEPS, STEPS = 10, 60
OUTPUT = WARM_STEPS + 3 * STEPS
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}


def time_steps(timer: Timer, tiny: bool) -> list[Row]:
    """Time overlapped decode steps (launched before the previous ends) and sequential ones."""
    rows = []
    sequences, prompt = (2, 20) if tiny else (SEQUENCES, PROMPT)
    with tempfile.TemporaryDirectory() as folder:
        layout = tiny_layout(LLAMA_7B) if tiny else replace(LLAMA_7B, num_layers=LAYERS)
        save_llama(layout, Path(folder), timer.device)
        parts = _build(folder, timer.device, sequences, prompt)
        for way, sampling in WAYS.items():
            seconds, busy = {}, None
            for ahead in (False, True):
                stepper = _decoding(parts, sequences, prompt, sampling, ahead=ahead)
                seconds[ahead] = _step_seconds(stepper, timer.device)
                if ahead and timer.device.type == "cuda":
                    busy = _busy_share(stepper)
                stepper.run()
            notes = [] if busy is None else [f"steps: GPU busy for {busy:.1%} of {way} decodes"]
            case = f"{layout.num_layers} layers of LLaMA-7B, {sequences} x {prompt}, {way}"
            rows.append(Row(case, seconds[True], peers={"one by one": seconds[False]}, notes=notes))
    return rows


def _build(folder: str, device: torch.device, sequences: int, prompt: int) -> Any:  # noqa: ANN401
    """Return an engine's parts."""
    # Imported here: a machine that only times kernels may lack their libraries.
    from octavo.engine.settings import EngineSettings  # noqa: PLC0415
    from octavo.engine.startup.build import build  # noqa: PLC0415

    settings = EngineSettings(
        model=folder,
        device=device.type,
        dtype="bfloat16",
        compile="auto" if device.type == "cuda" else "off",
        block_size=BLOCK_SIZE,
        num_blocks=sequences * -(-(prompt + OUTPUT) // BLOCK_SIZE),
        swap_space=0,
        max_num_seqs=max(sequences, 8),
    )
    return build(settings)


def _decoding(
    parts: Any,  # noqa: ANN401 - an engine's Parts
    sequences: int,
    prompt: int,
    sampling: dict[str, Any],
    *,
    ahead: bool,
) -> Any:  # noqa: ANN401 - a Stepper
    """Return a stepper whose sequences decode until the measurement ends."""
    from tests.engine.stepper import Stepper  # noqa: PLC0415 - as in `_build`

    stepper = Stepper(parts, async_scheduling=ahead)
    stepper.cache.check = lambda: None  # a check for tests, after every step
    generator = torch.Generator().manual_seed(0)
    vocab_size = stepper.parts.limits.vocab_size
    for seed in range(sequences):
        tokens = torch.randint(3, vocab_size, (prompt,), generator=generator).tolist()
        stepper.submit(tokens, OUTPUT, seed=seed, **sampling)
    while any(sequence.num_known_output < WARM_STEPS for sequence in _sequences(stepper)):
        stepper.step()
    return stepper


def _sequences(stepper: Any) -> Iterator[Any]:  # noqa: ANN401
    for group in stepper.scheduler.groups():
        yield from group.sequences


def _step_seconds(stepper: Any, device: torch.device) -> float:  # noqa: ANN401
    """Return the mean seconds of a step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(STEPS):
        stepper.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / STEPS


def _busy_share(stepper: Any) -> float:  # noqa: ANN401
    """Return the share of time in which the GPU was busy, from the profiler's timeline."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(STEPS):
            stepper.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / (reached - spans[0][0])
