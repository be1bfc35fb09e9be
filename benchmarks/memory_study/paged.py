"""Octavo: the engine's own scheduler and KV-cache manager, with a simulated executor.

The executor draws a token that means nothing but is not the siblings', whose
outputs the prefix cache would else take for one; outputs end by `max_tokens`, and
beams fork as `beams` says; time is the cost model's. Every count of blocks is the pool's own.
"""

from benchmarks.memory_study import cost
from benchmarks.memory_study.beams import Continuer
from benchmarks.memory_study.measure import MemoryUse, Recorder, RunResult
from benchmarks.memory_study.traces import Trace
from octavo.common.layer_groups import LayerGroup
from octavo.common.sampling_parameters import SamplingParams
from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.scheduling.batch import Batch, SampledToken, SamplerOutput
from octavo.engine.scheduling.beam_search import BeamState
from octavo.engine.scheduling.request import BeamSearch, Request
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.sequence import GroupState, Sequence, SequenceGroup
from octavo.engine.scheduling.steady import DecodedTokens
from octavo.engine.scheduling.swap_or_recompute import PreemptionPolicy

SAMPLE_EVERY = 8
"""Steps from one look at the memory to the next; a look walks every block table."""


class PagedSystem:
    """One run of a trace through Octavo's scheduler."""

    def __init__(
        self, trace: Trace, num_slots: int, *, block_size: int = 16, prefix_caching: bool = True
    ) -> None:
        self._trace = trace
        self._cache = KVCacheManager(
            num_blocks=num_slots // block_size,
            groups=[LayerGroup(block_size)],
            num_swap_blocks=cost.SWAP_BYTES // cost.SLOT_BYTES // block_size,
            prefix_caching=prefix_caching,
            step_tokens=num_slots,
        )
        self._policy = PreemptionPolicy("auto")
        self._policy.observe_transfer(1, cost.transfer_seconds(block_size))
        self._policy.observe_prefill(1, cost.SECONDS_PER_TOKEN)
        self._scheduler = Scheduler(
            self._cache,
            self._policy,
            max_num_seqs=cost.MAX_NUM_SEQS,
            max_num_batched_tokens=cost.MAX_NUM_BATCHED_TOKENS,
        )
        self._continuer = Continuer(trace.seed)
        self._groups: list[SequenceGroup] = []
        self._computed_tokens = 0

    def run(self, latency_bound: float | None = None) -> RunResult | None:
        """Serves the trace; None where its latency is bound to be over the bound."""
        trace, scheduler = self._trace, self._scheduler
        recorder = Recorder(len(trace), latency_bound)
        now, steps = 0.0, 0
        pending = 0.0  # seconds since the last look at the memory
        while len(recorder.result.latencies) < len(trace):
            if scheduler.idle:
                now = max(now, float(trace.arrivals[len(self._groups)]))
            self._submit_until(now)
            batch = scheduler.schedule()
            seconds = self._seconds(batch)
            now += seconds
            steps += 1
            if recorder.step(now, bool(scheduler.waiting or scheduler.swapped)):
                pending += seconds
                if steps % SAMPLE_EVERY == 0:
                    recorder.result.memory.add(pending, self._memory(batch))
                    pending = 0.0
            for group in self._update(batch):
                request = group.request
                recorder.complete(now - request.arrival, request.max_tokens)
            if recorder.hopeless:
                return None
        self._cache.check_idle()
        recorder.result.seconds = now
        recorder.result.extra = self._extra()
        return recorder.result

    def _submit_until(self, now: float) -> None:
        trace = self._trace
        while (index := len(self._groups)) < len(trace) and trace.arrivals[index] <= now:
            self._groups.append(self._group(index))
            self._scheduler.submit(self._groups[-1])

    def _group(self, index: int) -> SequenceGroup:
        """A request as the engine sees it."""
        n, width = self._trace.dataset.n, self._trace.dataset.beams
        search = BeamSearch(width) if width else None
        prompt = self._trace.prompt_tokens(index)
        request = Request(
            session=0,
            request_id=str(index),
            prompt=tuple(prompt),
            sampling=SamplingParams(n=n),
            max_tokens=int(self._trace.outputs[index]),
            arrival=float(self._trace.arrivals[index]),
            beam=search,
        )
        sequences = [Sequence(n * index + i, i, list(prompt), len(prompt)) for i in range(n)]
        return SequenceGroup(request, sequences, beam=BeamState(search) if search else None)

    def _seconds(self, batch: Batch) -> float:
        assert batch, "nothing can run and requests wait: the scheduler is stuck"
        self._computed_tokens += batch.num_tokens
        moved = len(batch.transfers.swap_in) + len(batch.transfers.swap_out)
        read = sum(part.end for part in batch.sequences)
        return cost.transfer_seconds(moved * self._cache.block_size) + cost.step_seconds(
            tokens=batch.num_tokens, context=read * cost.PAGED_READ
        )

    def _update(self, batch: Batch) -> list[SequenceGroup]:
        """Draws and books the step's tokens; returns the groups that are now complete."""
        output = SamplerOutput(DecodedTokens(batch.steady, [0] * len(batch.steady)))
        for part in batch.ruled:
            if part.group.beam and part.sampled:
                tokens = self._continuer.draw(part.group.beam.candidates_for(0))
                output.continuations[part.sequence.id] = tokens
            else:
                output.tokens.extend(SampledToken(part.group, s, s.index) for s in part.sampled)
        self._scheduler.advance(batch)
        self._scheduler.update(batch, output)
        groups = dict.fromkeys(part.group for part in batch.sequences)
        return [group for group in groups if group.state is GroupState.FINISHED]

    def _memory(self, batch: Batch) -> MemoryUse:
        """Looks at the memory as the step ends, before anything is freed.

        A block's useful slots are those with the K/V of a token: as many as the
        fullest of the sequences that hold it has put there. A prompt gets all its
        blocks when admitted, so what chunks of it are still to fill is reserved.
        """
        size, pool = self._cache.block_size, self._cache.device
        ends = {part.sequence.id: part.end for part in batch.sequences}
        filled: dict[int, int] = {}
        promised: dict[int, int] = {}
        logical = requests = 0
        for group in self._scheduler.running:
            requests += 1
            for sequence in group.live:
                if not self._cache.holds(sequence.id):
                    continue
                (blocks,) = self._cache.table(sequence.id)
                logical += len(blocks)
                end = ends.get(sequence.id, sequence.num_computed)
                _fill(filled, blocks, end, size)
                _fill(promised, blocks, max(end, sequence.num_tokens), size)
        assert len(filled) == pool.num_in_use, "blocks in use that no running sequence holds"
        held, useful, own = pool.num_in_use * size, sum(filled.values()), sum(promised.values())
        return MemoryUse(
            useful=useful,
            reserved=own - useful,
            internal=held - own,
            free=pool.num_available * size,
            logical=logical * size,
            requests=requests,
        )

    def _extra(self) -> dict[str, float]:
        counters = self._scheduler.counters
        outputs = self._trace.dataset.num_outputs * int(self._trace.outputs.sum())
        return {
            "prompt_tokens": int(self._trace.prompts.sum()),
            "cached_tokens": sum(group.cached_tokens for group in self._groups),
            "output_tokens": outputs,
            "computed_tokens": self._computed_tokens,
            "preemptions_swap": counters.preemptions_swap,
            "preemptions_recompute": counters.preemptions_recompute,
        }


def _fill(slots: dict[int, int], blocks: list[int], count: int, size: int) -> None:
    """Notes that a sequence's first `count` tokens lie in its blocks."""
    full = count // size
    slots.update(dict.fromkeys(blocks[:full], size))
    for i, block in enumerate(blocks[full:], start=full):
        slots[block] = max(slots.get(block, 0), count - i * size, 0)
