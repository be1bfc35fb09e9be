"""An engine on a GPU whose streams are late computes the same: no wait is missing.

See `lazy_gpu`. The model's step is one piece of work here; all around it is what a GPU runs, with
Triton's interpreter for the kernels.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.engine.core.step import StepError
from octavo.engine.execution.executor import Executor
from octavo.engine.execution.graph_sizes import step_sizes
from octavo.engine.execution.pending_step import PendingStep
from octavo.engine.memory import swap
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.scheduling.request import BeamSearch
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.kernels import host_copies
from tests.engine.execution.recording import Again
from tests.engine.stepper import Stepper, allow_even_tokens
from tests.kernels.triton_device import INTERPRETED

if not INTERPRETED:
    pytest.skip("it launches kernels in the interpreter", allow_module_level=True)

from tests.engine.execution.lazy_gpu import GPU, HostWaitsError, LazyGpu
from tests.engine.execution.queued_forward import QueuedForward

WAYS = (
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1, "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "seed": 2, "logprobs": 2, "n": 2},
    {"temperature": 0.7, "top_k": 20, "seed": 3, "min_tokens": 8, "eos": range(3, 400)},
    {"repetition_penalty": 1.7, "presence_penalty": 1.0, "bad_words": ((5, 6), (9,))},
    {
        "frequency_penalty": 1.5,
        "temperature": 0.3,
        "seed": 4,
        "allowed_token_ids": [*range(3, 300)],
    },
    {"beam": BeamSearch(2)},
    {"prompt_logprobs": 1},
)


@pytest.fixture(scope="module")
def parts(tiny_model):
    """An engine's parts on the CPU, with too few blocks for all requests."""

    def make():
        settings = {"num_blocks": 22, "block_size": 8, "swap_space": 0.001, "max_num_seqs": 6}
        settings |= {"dtype": "float32", "compile": "off", "preemption": "swap"}
        return build(EngineSettings(model=str(tiny_model), max_num_batched_tokens=24, **settings))

    return make


def outputs(parts, *, seed=0, eagerness=0.0, graphs=False):
    """Return an engine's tokens, log-probabilities and number of swap-ins on a simulated GPU."""
    gpu, made = LazyGpu(seed, eagerness), parts()
    loaded, cache = made.executor._loaded, made.executor.cache
    with gpu.in_use():
        forward = QueuedForward(gpu, loaded.eager, loaded.shape.vocab_size)
        tensors = CacheTensors(
            cache.layout,
            num_blocks=len(cache.device),
            num_swap_blocks=len(cache.swap),
            dtype=cache.device.dtype,
            device=GPU,
        )
        executor = Executor(replace(loaded, device=GPU, forward=forward), tensors)
        if graphs:
            executor.record_graphs(step_sizes(6, 0, 24), 512, Again().record)
        engine = Stepper(replace(made, executor=executor), async_scheduling=True)
        groups = []
        for i, way in enumerate(WAYS):
            prompt = [(7 * i + 11 * j) % 400 + 5 for j in range(4 + 9 * i)]
            groups.append(engine.submit(prompt, 12, **way))
        allow_even_tokens(groups[0], loaded.shape.vocab_size)
        gpu.may_wait = False
        engine.run()
        moved = sum(len(batch.transfers.swap_in) for batch in engine.batches)
        tokens = [[each.token_ids for each in group.sequences] for group in groups]
        scored = [group.prompt_logprobs for group in groups]
        found = tokens, repr(scored), repr([each.logprob for each in engine.sampled])
    return found, moved


@pytest.fixture(scope="module")
def expected(parts):
    """The outputs if everything is done at once."""
    found, moved = outputs(parts, eagerness=1.0)
    assert moved
    return found


@pytest.mark.parametrize(
    ("seed", "eagerness", "graphs"),
    [
        (0, 0.0, False),
        (1, 0.5, True),
        *(
            pytest.param(seed, eagerness, graphs, marks=pytest.mark.slow)
            for seed, eagerness in enumerate((0.0, 0.3, 0.6, 0.8, 0.9))
            for graphs in (False, True)
        ),
    ],
)
def test_whatever_the_gpu_is_late_with_the_outputs_are_the_same(
    parts, expected, seed, eagerness, graphs
):
    found, _ = outputs(parts, seed=seed, eagerness=eagerness, graphs=graphs)
    assert found == expected


def _never(*_):
    """Do nothing."""


def _without_waiting(copy):
    return copy._copy.tolist()


def _recorded_too_early(self, tensor):
    self._done = torch.cuda.Event(blocking=True)
    self._done.record()
    self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    self._copy.copy_(tensor, non_blocking=True)


_buffer = {}


def _from_one_buffer(array, device):
    """Reuse pinned memory before the last copy from it is done."""
    key = array.dtype, array.shape
    if key not in _buffer:
        _buffer[key] = torch.from_numpy(array).pin_memory()
    _buffer[key].numpy()[...] = array
    return _buffer[key].to(device, non_blocking=True)


FAULTS = {
    "swaps wait for nothing": (swap.CudaStream, "wait", _never),
    "tokens are read before they arrive": (host_copies.AsyncCopy, "tolist", _without_waiting),
    "their event is too early": (host_copies.AsyncCopy, "__init__", _recorded_too_early),
    "placeholders are not filled": (PendingStep, "fill_placeholders", _never),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(parts, expected, monkeypatch, fault):
    monkeypatch.setattr(*FAULTS[fault])
    try:
        found = outputs(parts)[0]
    except (StepError, ValueError, IndexError, OverflowError, AssertionError):
        return  # what was computed is no token
    assert found != expected


def test_the_stand_in_is_late():
    gpu = LazyGpu()
    with gpu.in_use():
        ones = torch.ones(3, device=GPU)
        copy = host_copies.AsyncCopy(ones + 1)
        assert copy._copy.isnan().all()
        assert copy.tolist() == [2.0, 2.0, 2.0]


def test_memory_that_another_stream_still_reads_is_lost():
    gpu, found = LazyGpu(), []
    with gpu.in_use():
        side, tensor = torch.cuda.Stream(), torch.ones(3, device=GPU)
        written = torch.cuda.Event()
        written.record()
        side.wait_event(written)
        with torch.cuda.stream(side):
            copy = host_copies.AsyncCopy(tensor)
        del tensor
        late = torch.cuda.Event()
        late.record()
        late.synchronize()
        found = copy.tolist()
    assert np.isnan(found).all()


@pytest.mark.parametrize(
    "fault",
    [
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor.copy_(torch.ones(3)),
        lambda tensor: torch.ones(3).to(GPU),
    ],
)
def test_what_makes_the_host_wait_raises(fault):
    gpu = LazyGpu()
    gpu.may_wait = False
    with gpu.in_use(), pytest.raises(HostWaitsError):
        fault(torch.ones(3, device=GPU))


def test_conversions_are_late_too():
    gpu = LazyGpu()
    with gpu.in_use(), torch.inference_mode():
        ones = torch.ones(3, device=GPU)
        converted = ones.double()
        assert converted.device == GPU
        copy = host_copies.AsyncCopy(converted)
        assert copy._copy.isnan().all()
        assert copy.tolist() == [1.0, 1.0, 1.0]
