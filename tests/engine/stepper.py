"""An engine without a server or a thread, stepped by hand."""

import itertools
import time
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from octavo.engine.core import EngineCore
from octavo.engine.metrics import EngineMetrics
from octavo.engine.scheduling.batch import ScheduledSequence
from octavo.engine.scheduling.request import Request
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup, TokenLogprob
from octavo.engine.startup.build import Parts


class Sampled(NamedTuple):
    """A sampled token."""

    group: SequenceGroup
    sequence: Sequence
    token_id: int
    logprob: TokenLogprob | None


def parts_of(batch):
    """Return a batch's scheduled sequences, including plain decodes."""
    plain = batch.plain
    tables = zip(*(table.tolist() for table in batch.plain_tables), strict=True)
    columns = zip(
        plain.groups, plain.sequences, (plain.positions - 1).tolist(), tables, strict=True
    )
    return [
        ScheduledSequence(group, sequence, start, start + 1, list(blocks), [sequence])
        for group, sequence, start, blocks in columns
    ] + batch.rest


class StandIn:
    """An executor for a core, except preparing and computing steps."""

    compiled = False
    eager_steps = 0

    def launch(self, batch, inputs, late):
        assert not late, "no request has a constraint"
        return self.compute(batch, inputs)

    def sample(self, step, left_out):
        assert not left_out, "no request has a constraint"

    def take_copy_times(self):
        return []

    def close(self):
        pass

    def take_images(self):
        return (), ()


def make_core(scheduler, executor, *, async_scheduling=False):
    """Return a core that runs in this thread."""
    return EngineCore(
        scheduler,
        executor,
        EngineMetrics(),
        lambda *_: None,
        max_waiting=1 << 20,
        async_scheduling=async_scheduling,
    )


class Stepper:
    """Runs requests to the end and records the steps.

    Attributes:
        batches: The scheduled batch of each step.
        sampled: The sampled tokens, without dropped ones.
    """

    def __init__(self, parts: Parts, *, async_scheduling: bool = False) -> None:
        self.parts = parts
        self.scheduler = parts.scheduler
        self.cache = parts.scheduler.cache
        self.core = make_core(parts.scheduler, parts.executor, async_scheduling=async_scheduling)
        self.batches = record_batches(parts.scheduler)
        self.sampled = []
        self._ids = itertools.count()

    def submit(
        self,
        prompt,
        max_tokens=16,
        *,
        eos=(),
        stop=(),
        min_tokens=0,
        beam=None,
        resume=None,
        priority=0,
        adapter=None,
        deadline=None,
        bad_words=(),
        constraint=None,
        **sampling,
    ):
        request = Request(
            session=0,
            request_id=str(next(self._ids)),
            prompt=tuple(prompt),
            sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            eos_token_ids=frozenset(eos),
            stop_token_ids=frozenset(stop),
            arrival=time.monotonic(),
            beam=beam,
            priority=priority,
            resume={} if resume is None else resume,
            adapter=adapter,
            deadline=deadline,
            bad_words=bad_words,
            constraint=constraint,
        )
        return submit(self.core, request)

    def adapter(self, name):
        """Return a loaded adapter by its name; None for none."""
        return None if name is None else self.parts.adapters.find(name)

    def step(self):
        """Compute a step; without async scheduling, return its batch."""
        samples = self.core.step()
        if samples is not None:
            columns = zip(samples.groups, samples.sequences, samples.token_ids, strict=True)
            self.sampled += [
                Sampled(*each, samples.logprobs.get(i)) for i, each in enumerate(columns)
            ]
        self.cache.check()
        return self.batches[-1]

    def run(self):
        while self.core.working:
            self.step()
        self.cache.check_idle()


def allow_even_tokens(group, vocab_size):
    """Mask a group's odd tokens, like a constraint that allows only even tokens."""
    mask = np.full(-(-vocab_size // 32), 0x55555555, np.int32)
    for sequence in group.sequences:
        sequence.matcher = SimpleNamespace(mask=mask, ready=True)


def record_batches(scheduler):
    """Return a list that collects the scheduler's batches from now on."""
    batches, schedule = [], scheduler.schedule

    def recorded():
        batch = schedule()
        if batch:
            batches.append(batch)
        return batch

    scheduler.schedule = recorded
    return batches


def submit(core, request):
    """Submit a request to a core that runs in this thread; return its group."""
    core.requests.submit(request)
    return core.requests.groups[request.session, request.request_id]
