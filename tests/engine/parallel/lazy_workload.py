"""Runs requests on two ranks, each on a simulated GPU that is late; prints the outputs as JSON.

python -m tests.engine.parallel.lazy_workload MODEL EAGERNESS [FAULT]

Each rank's stream runs its part of the model, the sums and the gathering. Rank 0's runs as late as
its host allows. The other rank's has a thread: it may not wait for its host, which waits for rank
0's messages.
"""

import json
import os
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from octavo.common import logging
from octavo.engine.execution.executor import Executor
from octavo.engine.execution.follower import Follower
from octavo.engine.execution.graph_sizes import step_sizes
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.models.sharding.rank_forward import RankForward
from octavo.engine.parallel.place import place_from_launcher
from octavo.engine.parallel.world import World
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import follower
from octavo.engine.startup.build import build
from tests.engine.execution.lazy_gpu import GPU, HostWaitsError, LazyGpu
from tests.engine.execution.queued_forward import QueuedForward
from tests.engine.execution.recording import Again
from tests.engine.stepper import Stepper, allow_even_tokens

WAITED = 3
"""Exit code of a rank that waits for its GPU."""
WAYS = (
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 1.0, "seed": 2, "logprobs": 2, "n": 2},
    {"repetition_penalty": 1.7},
    {"prompt_logprobs": 1},
)


def on_gpu(gpu, loaded, world):
    """Return a rank's part of a model on its simulated GPU."""
    first, vocabulary = world.start_of(loaded.shape.vocab_size), loaded.shape.vocab_size
    columns = min(world.part(vocabulary), vocabulary - first)
    forward = RankForward(QueuedForward(gpu, loaded.eager, columns), world, vocabulary)
    return replace(loaded, device=GPU, forward=forward)


def queue_collectives(gpu):
    """Make collectives outside of the model work of the stream."""
    broadcast, gather = World.broadcast, World.gather_columns

    def queued_broadcast(world, x):
        into = gpu.alias(x)
        gpu.launch(lambda: broadcast(world, into))

    def queued_gather(world, columns, width):
        out, into, given = None, None, gpu.alias(columns)
        if not world.place.rank:
            out = torch.empty((len(columns), width), dtype=columns.dtype, device=GPU)
            into = gpu.alias(out)

        def work():
            whole = gather(world, given, width)
            if into is not None:
                into.copy_(whole)

        gpu.launch(work)
        return out

    World.broadcast, World.gather_columns = queued_broadcast, queued_gather


def lead(gpu, settings, place):
    """Run requests on rank 0; return their outputs."""
    parts = build(settings, place)
    leader, cache = parts.leader, parts.executor.cache
    with gpu.in_use():
        queue_collectives(gpu)
        sizes = {"num_blocks": len(cache.device), "num_swap_blocks": len(cache.swap)}
        tensors = CacheTensors(cache.layout, **sizes, dtype=cache.device.dtype, device=GPU)
        loaded = on_gpu(gpu, parts.executor._loaded, leader.world)
        executor = Executor(loaded, tensors, leader)
        executor.record_graphs(step_sizes(6, 0, 24), 256, Again().record)
        assert executor.asynchronous
        engine = Stepper(replace(parts, executor=executor), async_scheduling=True)
        groups = []
        for i, way in enumerate(WAYS):
            prompt = [(7 * i + 11 * j) % 400 + 5 for j in range(4 + 9 * i)]
            groups.append(engine.submit(prompt, 10, **way))
        allow_even_tokens(groups[0], parts.limits.vocab_size)
        gpu.may_wait = False
        engine.run()
        leader.stop()
        return {
            "tokens": [[each.token_ids for each in group.sequences] for group in groups],
            "scores": repr([group.prompt_logprobs for group in groups]),
            "swapped": sum(len(batch.transfers.swap_in) for batch in engine.batches),
        }


@contextmanager
def running(gpu):
    """Let a thread run what the GPU has queued."""
    ended = threading.Event()

    def run():
        while not ended.is_set():
            if not any(stream.step(forced=False) for stream in list(gpu.streams)):
                time.sleep(1e-3)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def follow(gpu, settings, place, fault):
    """Compute what rank 0 sends."""
    usual, compute = follower.load_forward, Follower._compute
    stack = ExitStack()

    def load(settings, model, world):
        loaded = usual(settings, model, world)
        stack.enter_context(gpu.in_use())
        stack.enter_context(running(gpu))
        queue_collectives(gpu)
        if fault == "tokens":
            queued = World.broadcast
            World.broadcast = lambda world, x: queued(world, x.clone())
        return on_gpu(gpu, loaded, world)

    def without_waiting(self, step):
        gpu.may_wait = False
        try:
            compute(self, step)
            if fault == "waits":
                self._cache.device[0].tolist()
        except HostWaitsError:
            os._exit(WAITED)  # its stream may wait for rank 0

    follower.load_forward = load
    follower.recorder = lambda _: Again().record
    Follower._compute = without_waiting
    follower.peak_memory, follower.count_pool = lambda _: 0, lambda *_: (1 << 20, 1 << 20)
    torch.cuda.empty_cache = torch.cuda.reset_peak_memory_stats = lambda *_: None
    with stack:
        follower.follow(settings, place)


def main():
    model, eagerness, *fault = sys.argv[1:]
    logging.configure(log_level="error")
    place = place_from_launcher(os.environ, 2)
    gpu = LazyGpu(place.rank, 0.0 if place.rank else float(eagerness))
    settings = EngineSettings(
        model=model,
        tensor_parallel_size=2,
        dtype="float32",
        compile="off",
        preemption="swap",
        num_blocks=12,
        block_size=8,
        swap_space=0.001,
        max_num_seqs=6,
        max_num_batched_tokens=24,
    )
    if place.rank:
        follow(gpu, settings, place, *(fault or [None]))
    else:
        print(json.dumps(lead(gpu, settings, place)), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
