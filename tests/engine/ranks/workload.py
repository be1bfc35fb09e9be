"""Runs requests on models, as one rank of several or alone; rank 0 prints what came out as JSON.

python -m tests.engine.ranks.workload SIZE MODEL...
"""

import json
import os
import random
import sys

from octavo.common import logging
from octavo.engine.follower import follow
from octavo.engine.ranks.place import given_place
from octavo.engine.scheduling.request import BeamSearch
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import build
from tests.engine.stepper import Stepper

VOCABULARY = 500
SETTINGS = {
    "dtype": "float32",
    "compile": "off",
    "block_size": 8,
    "swap_space": 0.01,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 64,
}
MODES = {
    "ample": {"num_blocks": 512},
    "swap": {"num_blocks": 96, "preemption": "swap"},
    "recompute": {"num_blocks": 96, "preemption": "recompute"},
}


def submit_all(engine):
    """Submit 32 requests: greedy and seeded ones, some with several outputs, and beam searches."""
    numbers = random.Random(3)
    shared = [numbers.randrange(1, VOCABULARY) for _ in range(20)]

    def prompt(length):
        return [numbers.randrange(1, VOCABULARY) for _ in range(length)]

    for i in range(10):
        yield engine.submit(prompt(3 + 4 * i), 16)
    for i in range(10):
        own = shared + prompt(i)
        yield engine.submit(own, 16, temperature=0.8, top_p=0.9, top_k=40, seed=i)
    for i in range(8):
        yield engine.submit(prompt(9 + i), 12, temperature=1.0, top_k=40, seed=i, n=4, logprobs=2)
    for i in range(4):
        yield engine.submit(prompt(11 + i), 8, beam=BeamSearch(width=3))


def run(model, mode, place):
    engine = Stepper(build(settings_of(model, mode, place), place))
    groups = list(submit_all(engine))
    engine.run()
    counters = engine.scheduler.counters
    if engine.parts.leader is not None:
        engine.parts.leader.stop()
    return {
        "tokens": [
            [found.token_ids for found in group.beam.hypotheses]
            if group.beam
            else [sequence.token_ids[sequence.num_prompt :] for sequence in group.sequences]
            for group in groups
        ],
        "swapped": counters.preemptions_swap,
        "recomputed": counters.preemptions_recompute,
        "block_bytes": engine.parts.block_bytes,
        "weight_bytes": weight_bytes(engine.parts.executor),
    }


def weight_bytes(executor):
    """Return the bytes of the weights that this process holds."""
    step = executor._loaded.step
    model = getattr(step, "_step", step)
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def settings_of(model, mode, place):
    size = 1 if place is None else place.size
    return EngineSettings(model=model, tensor_parallel_size=size, **SETTINGS | MODES[mode])


def main():
    size, *models = sys.argv[1:]
    place = given_place(os.environ, int(size))
    logging.configure(log_level="error")
    found = {}
    for model in models:
        for mode in MODES:
            if place is not None and place.rank:
                follow(settings_of(model, mode, place), place)
            else:
                found[f"{model} {mode}"] = run(model, mode, place)
    if place is None or not place.rank:
        print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # other ranks' threads may be in a collective


if __name__ == "__main__":
    main()
