"""An engine without a server or a thread, stepped by hand."""

import itertools
import time

from octavo.engine.pipeline import Pipeline
from octavo.engine.scheduling.beam_search import BeamState
from octavo.engine.scheduling.request import Request, SamplingParams
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup
from octavo.engine.startup import Parts


class Stepper:
    """Runs requests to the end and keeps what was seen on the way."""

    def __init__(self, parts: Parts, *, ahead: bool = False) -> None:
        self.parts = parts
        self.pipeline = Pipeline(parts.scheduler, parts.executor, ahead=ahead)
        self.scheduler = parts.scheduler
        self.cache = parts.scheduler.cache
        self.batches = []
        self.draws = []
        self._ids = itertools.count()

    def submit(
        self, prompt, max_tokens=16, *, eos=(), stop=(), min_tokens=0, beam=None, **sampling
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
        )
        sequences = [
            Sequence(next(self._ids), i, list(prompt), len(prompt))
            for i in range(request.sampling.n)
        ]
        beam = BeamState(request.beam) if request.beam else None
        group = SequenceGroup(request, sequences, beam=beam)
        self.scheduler.submit(group)
        return group

    def step(self):
        """A step; without `ahead`, returns its batch."""
        done = self.pipeline.step(scheduled=self.batches.append)
        if done is not None:
            self.draws += done.result.draws
        self.cache.check()
        return self.batches[-1]

    def run(self):
        while self.pipeline.running or not self.scheduler.idle:
            self.step()
        self.cache.check_idle()
