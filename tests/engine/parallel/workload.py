"""Runs requests on models, as one of several ranks or alone; prints the results as JSON.

python -m tests.engine.parallel.workload SIZE CASES

CASES is JSON: each case has the functions that submit requests, a model, more settings, the ranks
whose step cannot be traced or whose kernels are refused; the number of stages, if the ranks are
not one; whether ranks share no memory; whether to check the model as a large one; whether to
schedule ahead, as on GPUs; how steps are recorded, see `Recording`; and the ranks that cannot
compile their step, if all compile it as on GPUs.
"""

import json
import os
import pickle
import random
import sys
import time
from contextlib import suppress
from functools import partial

import psutil
import torch

from octavo.common import logging
from octavo.common.models.errors import ModelError
from octavo.engine.compilation import jit, load_forward, traced_forward
from octavo.engine.compilation.load_forward import compiled_for_gpu
from octavo.engine.compilation.trace import UntraceableError
from octavo.engine.constraints.constraint import Constraint, ConstraintKind
from octavo.engine.constraints.grammar import compile_grammar
from octavo.engine.constraints.matcher import Matcher
from octavo.engine.execution.cuda_graphs import RecordingError
from octavo.engine.execution.graph_sizes import step_sizes
from octavo.engine.execution.recorded_steps import RecordedSteps
from octavo.engine.models import load_model
from octavo.engine.models.checks import widened
from octavo.engine.models.checks.twin_check import check_twin
from octavo.engine.models.linear import packed_linear
from octavo.engine.parallel.place import RankError, place_from_launcher
from octavo.engine.scheduling.request import BeamSearch, Request
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import follower, load
from octavo.engine.startup.build import build
from tests.engine.execution.recording import Again
from tests.engine.parallel.frozen_ranks import FrozenRanks, OtherSumsError
from tests.engine.stepper import Stepper, allow_even_tokens, submit

CPU = torch.device("cpu")
VOCABULARY = 500
PROMPTS = "prompts.pickle"
SETTINGS = {
    "dtype": "float32",
    "compile": "off",
    "block_size": 8,
    "num_blocks": 512,
    "swap_space": 0.01,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 64,
}

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
}
CONSTRAINTS = (
    Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(SCHEMA),)),
    Constraint(ConstraintKind.REGEX, ("[a-h]+(-[0-9]+)*",)),
)


def prompts(engine, count, length=9, seed=3):
    numbers, size = random.Random(seed), engine.parts.limits.vocab_size
    return [[numbers.randrange(1, size) for _ in range(length + i)] for i in range(count)]


def mixed(engine):
    """Submit 32 requests: greedy and seeded, some with several outputs, and beam searches."""
    numbers, size = random.Random(3), engine.parts.limits.vocab_size
    shared = [numbers.randrange(1, size) for _ in range(20)]

    def prompt(length):
        return [numbers.randrange(1, size) for _ in range(length)]

    for i in range(10):
        yield engine.submit(prompt(3 + 4 * i), 16)
    for i in range(10):
        own = shared + prompt(i)
        yield engine.submit(own, 16, temperature=0.8, top_p=0.9, top_k=40, seed=i)
    for i in range(8):
        yield engine.submit(prompt(9 + i), 12, temperature=1.0, top_k=40, seed=i, n=4, logprobs=2)
    for i in range(4):
        yield engine.submit(prompt(11 + i), 8, beam=BeamSearch(width=3))


def scored(engine):
    """Submit prompts with prompt log-probabilities."""
    for prompt in prompts(engine, 6, length=24):
        yield engine.submit(prompt, 4, prompt_logprobs=1)


def masked(engine):
    """Submit greedy and seeded requests beside some that allow only even tokens."""
    adapters = [*(engine.parts.adapters or ()), None]
    for i, prompt in enumerate(prompts(engine, 8 * len(adapters))):
        seeded = {"temperature": 0.9, "seed": i} if i % 2 else {}
        group = engine.submit(prompt, 16, adapter=adapters[i // 8], **seeded)
        if i % 4 < 2:
            allow_even_tokens(group, VOCABULARY)
        yield group


class Compiler:
    """Compiles constraints in the calling thread."""

    def __init__(self, table):
        self._tokens, self._words = table.build(), -(-table.size // 32)

    def prepare(self, preparation):
        grammar = compile_grammar(preparation.constraint, self._tokens)
        matchers = [Matcher(grammar.deep_copy(), self._words, preparation.rule)]
        for matcher in matchers:
            matcher.advance(())
        preparation.done(matchers)


def constrained(engine):
    """Submit prompts held to a JSON schema or a regular expression, with each adapter and none."""
    table = engine.parts.read_tokens()
    engine.core.requests._constraints = Compiler(table)
    adapters = [*(engine.parts.adapters or ()), None]
    for i, prompt in enumerate(prompts(engine, 8 * len(adapters), length=12)):
        seeded = {"temperature": 0.9, "seed": i} if i % 2 else {}
        given = {"adapter": adapters[i % len(adapters)], "eos": table.eos_token_ids}
        kind = CONSTRAINTS[i // 2 % len(CONSTRAINTS)]
        yield engine.submit(prompt, 20, constraint=kind, **given, **seeded)
        engine.core._take_calls()


def repetitive(engine):
    """Submit repetitive prompts, so that tokens are drafted."""
    for i, prompt in enumerate(prompts(engine, 6, length=4)):
        yield engine.submit(prompt * 4, 24, **({"temperature": 0.9, "seed": i} if i % 2 else {}))


def again(engine):
    """Submit prompts twice in sequence, so that the second is cached."""
    for _ in range(2):
        for prompt in prompts(engine, 4, length=40):
            yield engine.submit(prompt, 12)
        engine.run()


def adapted(engine):
    """Submit repetitive prompts with each adapter and none."""
    adapters = [*engine.parts.adapters, None]
    for i, prompt in enumerate(prompts(engine, 4 * len(adapters), length=5)):
        seeded = {"temperature": 0.9, "seed": i} if i % 2 else {}
        yield engine.submit(prompt * 3, 12, adapter=adapters[i % len(adapters)], **seeded)


def pictured(engine):
    """Submit the prompts with images that are saved beside the model; see `save_asked`."""
    prompts = pickle.loads((engine.parts.path / PROMPTS).read_bytes())
    for number, (tokens, images, max_tokens) in enumerate(prompts):
        rotary = engine.parts.vision.rotary_positions(tokens, images) if images else None
        request = Request(
            session=0,
            request_id=str(number),
            prompt=tuple(tokens),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            arrival=time.monotonic(),
            images=images,
            rotary=rotary,
        )
        yield submit(engine.core, request)


WORKS = {
    work.__name__: work
    for work in (mixed, scored, masked, constrained, repetitive, again, adapted, pictured)
}


def run(case, place):
    settings = settings_of(case, place)
    engine = Stepper(build(settings, place), async_scheduling=case.get("ahead", False))
    recording = None
    if "recorded" in case and place is not None:
        recording = Recording(case, place.rank)
        record = recording.recorder(engine.parts.leader.world)
        sizes = step_sizes(6, case["settings"].get("num_speculative_tokens", 0), 48)
        with suppress(RecordingError):
            longest = engine.parts.limits.max_model_len
            engine.parts.executor.record_graphs(sizes, longest, record)
    groups, resident = [], []
    for work in case.get("work", "mixed").split():
        groups += WORKS[work](engine)
        engine.run()
        resident.append(psutil.Process().memory_info().rss)
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
        "scores": [[one.logprob for one in group.prompt_logprobs or ()] for group in groups],
        "compiled": engine.parts.executor.compiled,
        "swapped": counters["preemptions_swap"],
        "recomputed": counters["preemptions_recompute"],
        "accepted": counters["accepted_tokens"],
        "cached": sum(group.cached_tokens for group in groups),
        "resident": resident,
        "block_bytes": engine.parts.block_bytes,
        "weight_bytes": weight_bytes(engine.parts.executor._loaded),
    } | (recording.found() if recording else {})


class Recording:
    """The recorder of one rank in a test: it records and replays decode steps.

    Args:
        case: Its `recorded` may have `fails`, the number of the graph that each rank cannot record,
            by rank; `wrong`, the rank that replays other graphs than rank 0 says; and `unchecked`,
            as adapters' products on CPUs read values.
        rank: The rank.
    """

    def __init__(self, case, rank):
        self._fails_at = case["recorded"].get("fails", {}).get(str(rank))
        self._wrong = case["recorded"].get("wrong") == rank
        self._unchecked = case["recorded"].get("unchecked", False)
        self.frozen, self.again = None, Again()

    def recorder(self, world):
        if self._unchecked:
            return self.again.record
        self.frozen = FrozenRanks(world, self._fails_at)
        if self._wrong:
            usual = RecordedSteps.replay

            def replay_the_last(self, _, inputs):
                return usual(self, len(self._sizes), inputs)

            RecordedSteps.replay = replay_the_last
        return self.frozen.record

    def found(self):
        if self.frozen is None:
            return {"replayed": self.again.replayed}
        return {"sums": self.frozen.sums, "order": self.frozen.order}


def weight_bytes(loaded):
    """Return the bytes of the weights that this process holds; None if it runs compiled."""
    model = getattr(loaded.forward, "_forward", loaded.forward)
    if loaded.compiled:
        return None
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def follow_and_weigh(case, place):
    """Compute what rank 0 sends; return the bytes of this rank's weights."""
    sizes, usual = [], follower.load_forward
    recording = Recording(case, place.rank) if "recorded" in case else None
    if recording is not None:
        follower.recorder = recording.recorder

    def load(*arguments):
        loaded = usual(*arguments)
        sizes.append(weight_bytes(loaded))
        return loaded

    follower.load_forward = load
    follower.follow(settings_of(case, place), place)
    follower.load_forward = usual
    return {"weight_bytes": sizes[0]} | (recording.found() if recording else {})


def settings_of(case, place):
    size = 1 if place is None else place.size
    stages = case.get("stages", 1) if size > 1 else 1
    ranks = {"tensor_parallel_size": size // stages, "pipeline_parallel_size": stages}
    return EngineSettings(model=case["model"], **ranks, **SETTINGS | case["settings"])


def refuse(*_):
    """Replace `trace`: report a failure."""
    raise UntraceableError("it is refused")


def compile_as_on_gpus(*, refused):
    """Make ranks compile their steps as on GPUs, but without machine code.

    Args:
        refused: Whether this rank cannot.
    """

    def make(self, *, eager):
        del eager
        loaded, whole = self._loaded, partial(self._of_all_ranks, everywhere=True)
        given = self.eager, loaded.device, loaded.check
        return self._of_all_ranks(compiled_for_gpu(*given, whole=whole, on_all=self._all))

    compiler = torch.compile
    torch.compile = lambda step, **options: compiler(step, **options, backend="eager")
    load_forward._Forwards.make = make
    packed_linear.pack_linears = lambda _: None
    if refused:
        jit.capture = refuse


def check_as_large():
    """Check models as large ones; return the list of whether they have a twin."""
    twins = []
    widened.SMALL = 0

    def check(*arguments):
        twins.append(check_twin(*arguments))
        return twins[-1]

    load_model.check_twin = check
    return twins


def refuse_kernels(*_):
    """Replace `check_kernels`: refuse the model."""
    raise NotImplementedError("there is no kernel")


def main():
    size, cases = int(sys.argv[1]), json.loads(sys.argv[2])
    place = place_from_launcher(os.environ, size)
    logging.configure(log_level="error")
    found = {}
    rank = 0 if place is None else place.rank
    usual = traced_forward.trace
    for name, case in cases.items():
        traced_forward.trace = refuse if rank in case.get("eager", ()) else usual
        if case.get("recorded", {}).get("unchecked"):
            load_model._pack = lambda *given: load_model._pack_on_gpu(given[0], *given[3:], CPU)
        if "uncompilable" in case:
            compile_as_on_gpus(refused=rank in case["uncompilable"])
        if case.get("sockets"):
            load.share_memory = lambda _: None
        twins = check_as_large() if case.get("large") else []
        if rank in case.get("refused", ()):
            load_model.check_kernels = refuse_kernels
        try:
            found[name] = follow_and_weigh(case, place) if rank else run(case, place)
            found[name]["twins"] = twins
        except (ModelError, RankError, OtherSumsError) as error:
            print(json.dumps(str(error)), flush=True)
            os._exit(1)
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # other ranks' threads may be in a collective


if __name__ == "__main__":
    main()
