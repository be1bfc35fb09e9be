"""The scheduler's rules hold for any mix of requests and any shortage of blocks."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from octavo.common.kv_cache.layer_groups import LayerGroup
from octavo.common.kv_cache.prefix_hash import ImageSpan
from octavo.engine.execution.pending_step import PendingStep
from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.sampling.reports import Continued
from octavo.engine.scheduling.beam_search import BeamState
from octavo.engine.scheduling.image_encodes import ImageEncodes
from octavo.engine.scheduling.progress import advance, update
from octavo.engine.scheduling.request import BeamSearch, FinishReason, PromptImage, Request
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.sequence import PLACEHOLDER, GroupState, Sequence, SequenceGroup
from octavo.engine.scheduling.swap_or_recompute import PreemptionPolicy
from tests.engine.stepper import StandIn, make_core, parts_of, record_batches, submit
from tests.plain import budget

BLOCK_SIZE = 4


def scheduler(
    num_blocks,
    *,
    swap=0,
    mode="auto",
    seqs=8,
    batched=16,
    scored=64,
    prefix_caching=True,
    images=None,
):
    cache = KVCacheManager(
        num_blocks=num_blocks,
        groups=[LayerGroup(BLOCK_SIZE)],
        num_swap_blocks=swap,
        prefix_caching=prefix_caching,
        step_tokens=10**6,
    )
    return Scheduler(
        cache,
        PreemptionPolicy(mode),
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        max_scored_tokens=scored,
        images=images,
    )


def request(
    id_, prompt, max_tokens=4, *, n=1, beams=False, priority=0, arrival=None, eos=(), scored=False
):
    arrival = float(id_) / 1e3 if arrival is None else arrival
    return Request(
        0,
        str(id_),
        tuple(prompt),
        SamplingParams(n=1 if beams else n, prompt_logprobs=0 if scored and not beams else None),
        max_tokens,
        arrival,
        priority=priority,
        beam=BeamSearch(n) if beams else None,
        eos_token_ids=frozenset(eos),
    )


def group(id_, prompt, *args, n=1, **others):
    sequences = [Sequence(100 * id_ + i, i, list(prompt), len(prompt)) for i in range(n)]
    return SequenceGroup(request(id_, prompt, *args, n=n, **others), sequences)


class Memory:
    """Blocks' contents, token by token, copied and written as by the executor."""

    def __init__(self, engine):
        self.pool = engine.cache.device
        self.device = [[None] * BLOCK_SIZE for _ in range(self.pool.num_blocks)]
        self.swap = [[None] * BLOCK_SIZE for _ in range(engine.cache.swap.num_blocks)]

    def execute(self, batch, token_at):
        moves = batch.transfers
        for pairs, source, target in (
            (moves.swap_out, self.device, self.swap),
            (moves.swap_in, self.swap, self.device),
            (moves.copies, self.device, self.device),
        ):
            for a, b in pairs:
                target[b] = list(source[a])
        for part in parts_of(batch):
            self.assert_holds(part, part.start, token_at)
        for part in parts_of(batch):
            for position in range(part.start, part.end):
                block = part.tables[0][position // BLOCK_SIZE]
                assert self.pool.references(block) == 1, "a shared block is written"
                self.device[block][position % BLOCK_SIZE] = token_at(part.sequence, position)
        for part in parts_of(batch):
            self.assert_holds(part, part.end, token_at)

    def assert_holds(self, part, count, token_at):
        held = [token for block in part.tables[0] for token in self.device[block]]
        own = [token_at(part.sequence, position) for position in range(count)]
        assert held[:count] == own, "it reads another's tokens"


class Machine(StandIn):
    """Samples with `choose`, continues beams by their tokens; scores are positions."""

    def __init__(self, choose=lambda sequence: 7, memory=None):
        self.choose = choose
        self.memory = memory
        self.most_scored = 0

    def prepare(self, batch, previous):
        return previous

    def compute(self, batch, previous):
        sampled = tokens_of(previous)

        def token_at(sequence, position):
            token = sequence.token_ids[position]
            return sampled[sequence.id] if token == PLACEHOLDER else token

        if self.memory is not None:
            self.memory.execute(batch, token_at)
        beams = [(part.group, s) for _, part in batch.beams for s in part.sampled]
        samples = batch.samples()
        token_ids = torch.tensor(list(map(self.choose, samples.sequences)), dtype=torch.int64)
        scores = [(part.group, [Scores(part.scored)]) for _, part in batch.scored]
        self.most_scored = max(self.most_scored, sum(len(part.scored) for _, part in batch.scored))
        step = PendingStep(batch)
        continued = continuations_of(beams) if beams else None
        step.set_tokens(samples, token_ids, continued=continued, scores=scores)
        return step


class Scores:
    """Return positions as log-probabilities."""

    def __init__(self, positions):
        self.positions = positions

    def logprobs(self):
        return list(self.positions)


def continuations_of(beams):
    """Return each beam's candidates, which depend only on its tokens; sometimes it may end."""
    counts = [group.beam.candidates_for(len(group.request.stopping)) for group, _ in beams]
    most = max(counts)
    token_ids = torch.zeros(len(beams), most, dtype=torch.int64)
    for i, (group, sequence) in enumerate(beams):
        tokens = sequence.token_ids
        first = sum(tokens) * 7 + len(tokens)
        token_ids[i] = 100 + (first + torch.arange(most)) % 50
        if first % 5 == 0 and group.request.stopping:
            token_ids[i, first % 3 % counts[i]] = 9
    falls = 0.1 + (token_ids[:, :1] % 4) / 10
    return Continued(
        [sequence.id for _, sequence in beams], counts, token_ids, -falls * (1 + torch.arange(most))
    )


def tokens_of(pending):
    """Return the token that a launched step samples for each sequence, by id."""
    if pending is None:
        return {}
    ids = [sequence.id for sequence in pending.samples.sequences]
    return dict(zip(ids, pending.token_ids.tolist(), strict=True))


def core_of(engine, machine, *, async_scheduling):
    """A core that runs in this thread, and a list of its batches."""
    batches = record_batches(engine)
    return make_core(engine, machine, async_scheduling=async_scheduling), batches


def step(engine, choose=lambda sequence: 7, memory=None):
    """A single step."""
    batch = engine.schedule()
    if batch:
        pending = Machine(choose, memory).compute(batch, None)
        advance(engine, batch)
        update(engine, batch, pending.collect())
    engine.cache.check()
    return batch


requests = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt tokens
        st.integers(1, 20),  # output tokens
        st.integers(1, 4),  # outputs
        st.sampled_from([-100, -100, -1, 0, 1]),  # priority; the lowest is background
        st.integers(0, 1),  # common token of prompts, for shared prefixes
        st.integers(0, 3),  # steps before the next request
        st.booleans(),  # the prompt is scored
        st.sampled_from([False, False, True]),  # the outputs are a beam search's
    ),
    min_size=1,
    max_size=12,
)


@given(
    requests=requests,
    num_blocks=st.integers(8, 40),
    swap=st.integers(0, 40),
    mode=st.sampled_from(["auto", "swap", "recompute"]),
    seqs=st.integers(4, 12),
    batched=st.integers(12, 40),
    scored=st.integers(1, 20),
    prefix_caching=st.booleans(),
    async_scheduling=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_every_request_that_fits_is_finished(
    requests, num_blocks, swap, mode, seqs, batched, scored, prefix_caching, async_scheduling
):
    engine = scheduler(
        num_blocks,
        swap=swap,
        mode=mode,
        seqs=seqs,
        batched=batched,
        scored=scored,
        prefix_caching=prefix_caching,
    )
    blocks = budget(num_blocks, BLOCK_SIZE)
    machine = Machine()
    core, batches = core_of(engine, machine, async_scheduling=async_scheduling)
    groups = []
    for prompt, output, n, priority, token, pause, score, beams in requests:
        if output > blocks.fitting_output(prompt, n, 500):
            continue
        tokens = [token] * prompt
        asked = request(
            len(groups), tokens, output, n=n, beams=beams, priority=priority, scored=score
        )
        groups.append(submit(core, asked))
        for _ in range(pause):
            checked_step(engine, core, batches)
    for _ in range(3000):
        if not core.working:
            break
        checked_step(engine, core, batches)
    assert engine.idle, "requests are stuck"
    engine.cache.check_idle()
    assert machine.most_scored <= scored
    event(f"preemptions by swap: {engine.counters['preemptions_swap'] > 0}")
    event(f"preemptions by recompute: {engine.counters['preemptions_recompute'] > 0}")
    for done in groups:
        assert done.state is GroupState.FINISHED
        if done.beam is not None:
            assert done.beam.hypotheses == searched(done.request)
            continue
        for sequence in done.sequences:
            assert sequence.finish_reason is FinishReason.LENGTH
            assert sequence.num_output == done.request.max_tokens
        if done.request.sampling.prompt_logprobs is not None:
            assert done.prompt_logprobs == list(range(len(done.request.prompt) - 1))


@given(
    requests=requests,
    ends=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 11), st.none() | st.integers(0, 3)),
        max_size=12,
    ),  # step, request and output, or all of its outputs
    eos_every=st.integers(2, 30),
    num_blocks=st.integers(8, 30),
    swap=st.integers(0, 30),
    mode=st.sampled_from(["swap", "recompute"]),
    batched=st.integers(8, 24),
    prefix_caching=st.booleans(),
    async_scheduling=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_outputs_that_end_at_any_moment_leave_the_others_whole(
    requests, ends, eos_every, num_blocks, swap, mode, batched, prefix_caching, async_scheduling
):
    engine = scheduler(
        num_blocks, swap=swap, mode=mode, batched=batched, prefix_caching=prefix_caching
    )
    blocks = budget(num_blocks, BLOCK_SIZE)
    coming, groups = [], []
    for prompt, tokens, n, priority, token, _, score, beams in requests:
        if tokens <= blocks.fitting_output(prompt, n, 500):
            number = len(coming)
            # Tokens that identify positions and, after a common prefix, requests.
            tail = [token, *range(10, 14), *range(20 + token, 20 + token + prompt)][:prompt]
            kind = {"n": n, "beams": beams, "priority": priority, "scored": score}
            coming.append(request(number, tail, tokens, eos={9}, **kind))

    def choose(sequence):
        number = sequence.id + 7 * sequence.num_output
        return 9 if number % eos_every == 0 else 100 + number % 5

    machine = Machine(choose, Memory(engine))
    core, batches = core_of(engine, machine, async_scheduling=async_scheduling)
    for now in range(3000):
        if coming and now % 3 == 0:
            groups.append(submit(core, coming.pop(0)))
        for when, number, index in ends:
            if when == now and number < len(groups):
                core.requests.abort(0, str(number), index)
                engine.cache.check()
        if not coming and not core.working:
            break
        checked_step(engine, core, batches)
    assert engine.idle, "requests are stuck"
    engine.cache.check_idle()
    for done in groups:
        assert done.state is GroupState.FINISHED
        if done.beam is not None:
            aborted = done.sequences[0].finish_reason is FinishReason.ABORTED
            assert aborted or done.beam.hypotheses == searched(done.request)
            continue
        for sequence in done.sequences:
            output = sequence.token_ids[sequence.num_prompt :]
            assert PLACEHOLDER not in output
            full = len(output) == done.request.max_tokens
            assert 9 not in output[:-1], "it went on past its end"
            assert sequence.finish_reason in {
                FinishReason.ABORTED,
                FinishReason.EOS if output[-1:] == [9] else FinishReason.LENGTH if full else None,
            }


def searched(request):
    """Return a beam search's result without a scheduler."""
    search, count = BeamState(request.beam), len(request.prompt)
    beams = [Sequence(0, 0, list(request.prompt), count)]
    while beams:
        group = SequenceGroup(request, beams, beam=search)
        found = continuations_of([(group, beam) for beam in beams]).collect()
        chosen = search.advance(
            [beam.token_ids[count:] for beam in beams],
            [found[beam.id] for beam in beams],
            stopping=request.stopping,
            max_tokens=request.max_tokens,
        )
        outputs = [[*beams[c.beam].token_ids, c.token_id] for c in chosen]
        beams = [Sequence(i, 0, token_ids, count) for i, token_ids in enumerate(outputs)]
    return search.hypotheses


def checked_step(engine, core, batches):
    searches = [group for group in engine.running if group.beam is not None and advances(group)]
    before = {id(g): [s.num_tokens for s in g.sequences] for g in engine.groups()}
    pending, number = core.steps.pending, len(batches)
    output = core.step()
    engine.cache.check()
    worked = len(batches) > number or output is not None
    assert worked or engine.idle, "a step did nothing though work is left"
    for batch in batches[number:]:
        assert batch.num_tokens <= engine.max_num_batched_tokens
        for part in parts_of(batch):
            assert part.start < part.end <= len(part.tables[0]) * BLOCK_SIZE
            for sequence in part.sampled if part.group.beam is None else ():
                known = before[id(part.group)][sequence.index]
                dropped = sequence.finish_reason is not None and pending is not None
                assert sequence.num_tokens == known + (not dropped)
        missed = set(searches) & set(engine.running) - groups_of(batch)
        missed -= set(engine._background.paused)
        assert not missed or (pending and missed <= groups_of(pending.batch)), "it missed two steps"
    assert sum(len(g.live) for g in engine.running) <= engine.max_num_seqs


def advances(search):
    """Return whether each beam has at most its last token left to compute."""
    return all(beam.num_output and beam.num_uncomputed <= 1 for beam in search.live)


def groups_of(batch):
    return set(batch.groups)


def test_decodes_come_first_and_prefill_takes_what_is_left():
    engine = scheduler(64, batched=16)
    engine.submit(group(0, range(4)))
    engine.submit(group(1, range(100, 140)))
    first = step(engine)
    assert [(part.start, part.end) for part in parts_of(first)] == [(0, 4), (0, 12)]
    second = step(engine)
    assert [(part.start, part.end) for part in parts_of(second)] == [(4, 5), (12, 27)]


def test_scored_prompts_take_turns_and_keep_nobody_else_waiting():
    engine = scheduler(64, batched=64, scored=8)
    for i in range(2):
        engine.submit(group(i, range(100 * i, 100 * i + 12), scored=True))
    engine.submit(group(2, range(500, 512)))
    spans = [
        [(part.group.request.request_id, part.start, part.end) for part in parts_of(step(engine))]
        for _ in range(2)
    ]
    assert spans[0] == [("0", 0, 8), ("2", 0, 12)]
    assert sorted(spans[1]) == [("0", 8, 12), ("1", 0, 5), ("2", 12, 13)]


def test_the_newest_group_of_the_lowest_priority_is_preempted():
    engine = scheduler(9, mode="recompute", batched=32, prefix_caching=False)
    urgent = group(2, range(8), 8, priority=1)
    old, new = group(0, range(8), 8), group(1, range(8), 8)
    for each in (old, new, urgent):
        engine.submit(each)
    while not engine.counters["preemptions_recompute"]:
        step(engine)
    assert (urgent.state, old.state, new.state) == (
        GroupState.RUNNING,
        GroupState.RUNNING,
        GroupState.WAITING,
    )


def test_without_swap_space_groups_are_recomputed_and_that_is_counted():
    engine = scheduler(6, swap=1, mode="swap", prefix_caching=False)
    for i in range(2):
        engine.submit(group(i, range(8), 8))
    while not engine.idle:
        step(engine)
    assert engine.counters["preemptions_swap"] == 0
    assert engine.counters["swap_space_full"] == engine.counters["preemptions_recompute"] > 0


def test_swapped_groups_come_back_before_new_ones_start():
    engine = scheduler(6, swap=16, mode="swap", prefix_caching=False)
    for i in range(2):
        engine.submit(group(i, range(8), 12))
    while not engine.swapped:
        step(engine)
    newcomer = group(2, range(2), 1)
    engine.submit(newcomer)
    swapped = engine.swapped[0]
    while not newcomer.admitted:
        step(engine)
    assert swapped.state in {GroupState.RUNNING, GroupState.FINISHED}
    assert engine.counters["swap_ins"] == 1


def test_priority_goes_first_but_what_waited_goes_before_anything_new():
    now = time.monotonic()
    waited = group(0, [1], arrival=now - 25)
    urgent = group(1, [1], arrival=now, priority=2)
    mild = group(2, [1], arrival=now, priority=1)
    assert sorted([mild, urgent, waited], key=lambda g: g.order) == [waited, urgent, mild]


def test_a_lead_that_ends_in_its_prefill_leaves_the_others_running():
    engine = scheduler(32, batched=8)
    shared = group(0, range(20), 3, n=3)
    engine.submit(shared)
    step(engine)
    engine.finish(shared, shared.sequences[0], FinishReason.ABORTED)
    engine.cache.check()
    while not engine.idle:
        step(engine)
    assert [s.num_output for s in shared.sequences] == [0, 3, 3]
    engine.cache.check_idle()


@pytest.mark.parametrize(("blocks", "tokens", "swaps"), [(10, 10, True), (1000, 10, False)])
def test_auto_takes_the_cheaper_way(blocks, tokens, swaps):
    policy = PreemptionPolicy("auto")
    assert policy.prefers_swap(blocks=blocks, tokens=tokens)
    policy.observe_transfer(10, 0.010)
    policy.observe_prefill(100, 0.200)
    assert policy.prefers_swap(blocks=blocks, tokens=tokens) is swaps


@pytest.mark.parametrize(
    ("limit", "rate", "chunks"),
    [(0.1, 0.01, [10, 10, 10, 6]), (0.1, 0.5, [4] * 9), (0.1, None, [36]), (math.inf, 0.5, [36])],
)
def test_prompts_beside_decodes_take_no_longer_than_allowed(limit, rate, chunks):
    engine = scheduler(64, batched=64)
    engine.max_prefill_seconds = limit
    if rate is not None:
        engine.policy.observe_prefill(100, 100 * rate)
    engine.submit(group(0, range(40), 30))
    assert step(engine).num_tokens == 40, "it is limited though nothing decodes"
    for prompt in (group(1, range(50, 86), 1), group(2, range(100, 136), 1)):
        engine.submit(prompt)
        found = []
        while prompt.state is not GroupState.FINISHED:
            found.append(step(engine).num_tokens - 1)
        assert found == chunks


@pytest.mark.parametrize("background", [False, True])
def test_an_image_that_must_not_be_split_is_computed_beside_decodes(background):
    engine = scheduler(64, batched=64, images=ImageEncodes(100, 100, longest_whole=60))
    engine.max_prefill_seconds = math.inf if background else 0.02
    engine.policy.observe_prefill(100, 1.0)
    engine._background.observe_decodes(1, 0.02)
    engine.submit(group(0, range(4), 200))
    step(engine)
    described = group(1, range(100, 140), 1, priority=-100 if background else 0)
    image = PromptImage(ImageSpan(8, 38, b"digest"), np.arange(8, 38), {})
    described.request = replace(described.request, images=(image,))
    engine.submit(described)
    for _ in range(4):
        step(engine)
        engine.images.finish(engine.images.chosen, ())
    assert described.state is GroupState.FINISHED


def shared_step(engine):
    """Step; return how many tokens of each request were computed."""
    return {part.group.request.request_id: part.end - part.start for part in parts_of(step(engine))}


def test_background_requests_add_little_to_a_step_beside_others():
    engine = scheduler(200, seqs=32, batched=64)
    for tokens in (1, 2, 4, 8, 16, 32):
        engine._background.observe_decodes(tokens, 0.01 + 0.005 * tokens)
    engine.policy.observe_prefill(100, 0.1)
    for i in range(12):
        engine.submit(group(i, [100 + i] * 4, 60, priority=-100, arrival=0))
    assert len(shared_step(engine)) == 12, "alone they are unlimited"
    assert len(shared_step(engine)) == 12
    chat = group(50, range(200, 210), 12)
    engine.submit(chat)
    assert shared_step(engine).pop("50") == 10, "its prompt waits for them"
    engine.submit(group(51, range(300, 350), 60, priority=-100, arrival=0))
    # One decode takes 15 ms, so they may add 7.5 ms: one decode, and 7 tokens of prefill.
    found = shared_step(engine)
    assert found == {"50": 1, "0": 1}
    while chat.state is not GroupState.FINISHED:
        assert shared_step(engine) == {"50": 1, "0": 1}
    assert len(shared_step(engine)) > 12, "they stay paused"
    while not engine.idle:
        step(engine)
    engine.cache.check_idle()


def test_prompts_of_background_requests_are_computed_in_small_chunks_beside_others():
    engine = scheduler(200, batched=64)
    engine._background.observe_decodes(1, 0.02)
    engine.policy.observe_prefill(100, 0.1)
    engine.submit(group(0, [1, 2, 3], 60))
    step(engine)
    engine.submit(group(1, range(100, 130), 2, priority=-100))
    assert [shared_step(engine).get("1") for _ in range(4)] == [10, 10, 10, 1]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize(("blocks", "seqs"), [(40, 32), (200, 8)])
def test_others_take_the_memory_and_the_slots_of_paused_background_requests(blocks, seqs, mode):
    engine = scheduler(blocks, swap=40, mode=mode, seqs=seqs, batched=64)
    for tokens in (1, 2, 4, 8, 16, 32):
        engine._background.observe_decodes(tokens, 0.01 * tokens)
    batch = [group(i, [100 + i] * 12, 20, priority=-100, arrival=0) for i in range(8)]
    for each in batch:
        engine.submit(each)
    step(engine)
    chats = [group(50 + i, [200 + i] * 20, 6) for i in range(3)]
    for each in chats:
        engine.submit(each)
    for _ in range(8):
        step(engine)
    assert all(chat.state is GroupState.FINISHED for chat in chats)
    while not engine.idle:
        step(engine)
    assert all(each.sequences[0].num_output == 20 for each in batch)
    engine.cache.check_idle()


def crowd(count=40):
    """Groups of several outputs whose prompts take more than a step, all submitted at once."""
    return [
        group(i, [100 + i, *range(200, 211 + 7 * (i % 4))], 12 + 5 * (i % 3), n=2 + i % 3)
        for i in range(count)
    ]


def serve(engine, groups):
    """Serve all to the end; return the numbers of steps, computed tokens and sampled tokens."""
    steps = computed = drawn = 0
    memory = Memory(engine)
    for each in groups:
        engine.submit(each)
    while not engine.idle:
        before = sum(s.num_output for each in groups for s in each.sequences)
        batch = step(engine, lambda s: 300 + s.id % 7, memory)
        after = sum(s.num_output for each in groups for s in each.sequences)
        assert batch, "a step did nothing though there was work"
        steps, computed, drawn = steps + 1, computed + batch.num_tokens, drawn + after - before
        assert steps < 5000, "requests are stuck"
    engine.cache.check_idle()
    assert all(len(each.live) == 0 for each in groups)
    return steps, computed, drawn


@pytest.mark.few(3)
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("swap", [1, 6, 12, 24])
def test_a_full_swap_space_neither_stalls_nor_slows(swap, prefix_caching):
    """Groups of n >= 2 that fill the cache stalled other engines: vLLM #546, #787, #5578."""

    def busy(mode, swap):
        return scheduler(
            48, swap=swap, mode=mode, seqs=24, batched=24, prefix_caching=prefix_caching
        )

    recomputing, swapping = busy("recompute", 0), busy("swap", swap)
    steps, computed, drawn = serve(recomputing, crowd())
    steps_full, computed_full, drawn_full = serve(swapping, crowd())
    assert recomputing.counters["preemptions_recompute"] > 10
    assert swapping.counters["swap_space_full"] > 0
    assert drawn_full == drawn == sum(g.request.max_tokens * len(g.sequences) for g in crowd())
    assert drawn_full / steps_full >= 0.8 * drawn / steps
    assert computed_full <= 1.2 * computed


def test_a_group_cancelled_while_swapped_out_leaves_nothing():
    engine = scheduler(6, swap=16, mode="swap", prefix_caching=False)
    for i in range(2):
        engine.submit(group(i, range(8), 12))
    while not engine.swapped:
        step(engine)
    (cancelled,) = engine.swapped
    assert engine.cache.swap.num_in_use > 0
    for sequence in cancelled.live:
        engine.finish(cancelled, sequence, FinishReason.ABORTED)
    assert cancelled.state is GroupState.FINISHED
    assert not engine.swapped
    assert engine.cache.swap.num_in_use == 0
    while not engine.idle:
        step(engine)
    engine.cache.check_idle()
