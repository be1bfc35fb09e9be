"""Steps built from cached columns equal steps built from the sequences."""

import time

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from octavo.common.kv_cache.layer_groups import LayerGroup
from octavo.engine.execution.inputs import make_inputs
from octavo.engine.execution.pending_step import PendingStep
from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.scheduling.batch import Batch
from octavo.engine.scheduling.request import Request
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.sequence import GroupState
from octavo.engine.scheduling.swap_or_recompute import PreemptionPolicy
from octavo.engine.speculation.method import Method
from octavo.engine.speculation.speculation import Speculation
from tests.engine.stepper import StandIn, make_core, parts_of, submit
from tests.plain import budget

BLOCK_SIZE = 4
EOS = 9


class Layout:
    """The part of a cache's layout that inputs use."""

    groups = (LayerGroup(BLOCK_SIZE), LayerGroup(2 * BLOCK_SIZE))


class Guesses(Method):
    """Drafts for some sequences at some lengths, sometimes correctly."""

    def __init__(self, every):
        self.every = every

    def draft(self, history, most):
        length = len(history.tokens)
        return [token_at(length + i) for i in range(most - 1)] if length % self.every == 0 else []

    def learn(self, history):
        pass


def token_at(position):
    """Return every output's token at a position; drafts are wrong at some positions."""
    return 100 + position % 7


class Machine(StandIn):
    """Builds each step's inputs in both ways."""

    def __init__(self, cache, ends):
        self.cache = cache
        self.ends = ends
        self.plain = 0

    def prepare(self, batch, previous):
        if not batch.num_sequences:
            return None  # the step only copies blocks
        kept, from_scratch = (
            make_inputs(each, layout=Layout, device=torch.device("cpu"), shapes=[None] * 2)
            for each in (batch, self.from_scratch(batch))
        )
        for name in ("laid", "query_starts", "query_lens", "seq_lens", "rows"):
            found, expected = (getattr(arrays, name) for arrays, _ in (kept, from_scratch))
            assert found.tolist() == expected.tolist(), name
        for name in ("positions", "limits", "numbers", "sessions", "greedy", "rows"):
            found, expected = (getattr(inputs.samples, name) for _, inputs in (kept, from_scratch))
            assert found.tolist() == expected.tolist(), name
        for layers, *tables in zip(
            Layout.groups, kept[0].tables, from_scratch[0].tables, strict=True
        ):
            for end, found, expected in zip(kept[0].seq_lens, *tables, strict=True):
                read = layers.blocks_for(int(end))
                assert found[:read].tolist() == expected[:read].tolist()
        self.plain += len(batch.plain)
        return kept[1]

    def from_scratch(self, batch):
        """Build the same step from the sequences alone, without cached columns."""
        plain = [
            part._replace(
                start=part.sequence.num_computed,
                end=part.sequence.num_computed + 1,
                tables=self.cache.table(part.sequence.id),
            )
            for part in parts_of(batch)[: len(batch.plain)]
        ]
        for part in plain:
            assert part.group.state is GroupState.RUNNING
            assert part.end == part.sequence.num_tokens
        parts = [*plain, *batch.rest]
        assert len({part.sequence.id for part in parts}) == len(parts), "computed twice"
        return Batch(rest=parts, transfers=batch.transfers)

    def compute(self, batch, inputs):
        if inputs is None:
            return PendingStep(batch)
        samples = inputs.samples
        tokens = [
            EOS if (s.id + place) % self.ends == 0 else token_at(place) + (place % 11 == 0)
            for s, place in zip(samples.sequences, samples.positions.tolist(), strict=True)
        ]
        step = PendingStep(batch)
        step.set_tokens(samples, torch.tensor(tokens, dtype=torch.int64))
        return step


requests = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt tokens
        st.integers(1, 30),  # output tokens
        st.sampled_from([{}, {}, {}, {"n": 2}, {"logprobs": 0}, {"presence_penalty": 0.5}]),
        st.integers(0, 9),  # minimum output tokens
        st.integers(-1, 1),  # priority
        st.integers(0, 2),  # steps before the next request
    ),
    min_size=4,
    max_size=12,
)


@given(
    requests=requests,
    aborts=st.dictionaries(st.integers(0, 60), st.integers(0, 11), max_size=6),  # by step
    ends=st.integers(20, 200),
    drafts=st.none() | st.integers(2, 9),
    num_blocks=st.integers(26, 50),
    swap=st.integers(0, 40),
    mode=st.sampled_from(["swap", "recompute"]),
    prefix_caching=st.booleans(),
    async_scheduling=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_steps_are_those_built_from_scratch(
    requests, aborts, ends, drafts, num_blocks, swap, mode, prefix_caching, async_scheduling
):
    cache = KVCacheManager(
        num_blocks=num_blocks,
        groups=Layout.groups,
        num_swap_blocks=swap,
        prefix_caching=prefix_caching,
        step_tokens=10**6,
    )
    scheduler = Scheduler(
        cache,
        PreemptionPolicy(mode),
        max_num_seqs=10,
        max_num_batched_tokens=40,
        speculation=None if drafts is None else Speculation(Guesses(drafts), 3),
    )
    machine = Machine(cache, ends)
    core = make_core(scheduler, machine, async_scheduling=async_scheduling)
    groups, now = [], 0

    def step():
        nonlocal now
        if (number := aborts.get(now)) is not None and number < len(groups):
            core.requests.abort(0, str(number), None)
        now += 1
        core.step()
        cache.check()

    for prompt, output, sampling, least, priority, pause in requests:
        n = sampling.get("n", 1)
        if output > budget(num_blocks // 2, BLOCK_SIZE).fitting_output(prompt, n, 500):
            continue
        request = Request(
            0,
            str(len(groups)),
            tuple(range(prompt)),
            SamplingParams(**sampling),
            output,
            time.monotonic() + len(groups) / 1e3,
            priority=priority,
            min_tokens=min(least, output),
            eos_token_ids=frozenset({EOS}),
        )
        groups.append(submit(core, request))
        for _ in range(pause):
            step()
    for _ in range(3000):
        if not core.working:
            break
        step()
    assert scheduler.idle, "requests are stuck"
    cache.check_idle()
    assert len(scheduler._decodes) == 0
    assert all(group.decode_row is None for group in groups)
    counters = scheduler.counters
    event(f"plain: {machine.plain > 0}")
    event(f"preempted: {counters['preemptions_swap'] + counters['preemptions_recompute'] > 0}")
    event(f"drafts were right: {counters['accepted_tokens'] > 0}")
    event(f"drafts were wrong: {counters['accepted_tokens'] < counters['drafted_tokens']}")
