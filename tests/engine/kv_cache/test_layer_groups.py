"""Windows, chunks, states and spilled blocks: block accounting against tokens' needs."""

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.common.kv_cache.layer_groups import LayerGroup
from octavo.engine.kv_cache import FileTakenError, KVCacheManager, OutOfBlocksError, Span
from octavo.engine.kv_cache.block_table import RELEASED

FULL = LayerGroup(16)
WIDE = LayerGroup(32)
WINDOW = LayerGroup(16, window=24)
CHUNK = LayerGroup(32, chunk=48)
STATE = LayerGroup(16, state_blocks=3)
SMALL_STATE = LayerGroup(16, state_blocks=1)
SPILL = LayerGroup(16, kept=64, unit=32)
STEP = 40
MIXES = [
    [WINDOW],
    [CHUNK],
    [SMALL_STATE],
    [FULL, WINDOW],
    [FULL, STATE],
    [WIDE, WINDOW, CHUNK],
    [FULL, WIDE, CHUNK, STATE, SMALL_STATE],
]


def manager(groups, blocks=64, swap=64, *, prefix=True):
    return KVCacheManager(
        num_blocks=blocks,
        groups=groups,
        num_swap_blocks=swap,
        prefix_caching=prefix,
        step_tokens=STEP,
    )


def run(cache, id_, tokens, start=0, step=STEP):
    """Compute a sequence's tokens from `start` on; return the ends of its steps."""
    ends = []
    while start < len(tokens):
        end = cache.pause_before(id_, start, min(start + step, len(tokens)))
        cache.extend([Span(id_, start, end)])
        cache.take_transfers()
        cache.publish(id_, tokens, end)
        cache.check()
        ends.append(end)
        start = end
    return ends


def test_a_long_sequence_holds_no_more_than_its_window():
    cache = manager([WINDOW], blocks=8)
    tokens = list(range(1000))
    cache.admit(0, tokens)
    run(cache, 0, tokens)
    blocks = cache.table(0)[0]
    assert sum(block != RELEASED for block in blocks) <= WINDOW.held(1000, STEP) < 8
    cache.free(0)
    cache.check_idle()


def test_a_chunk_is_released_when_the_next_begins():
    cache = manager([CHUNK])
    tokens = list(range(96))
    cache.admit(0, tokens)
    run(cache, 0, tokens)
    cache.extend([Span(0, 96, 97)])
    assert cache.table(0)[0][:3] == [RELEASED] * 3


@pytest.mark.parametrize("groups", [[FULL, STATE], [FULL, SMALL_STATE, STATE]])
def test_a_prefix_whose_state_is_in_use_is_admitted_only_with_room_for_the_states_copy(groups):
    tokens = list(range(40))
    for blocks in range(5, 24):
        cache = manager(groups, blocks=blocks)
        if cache.blocks_to_admit(tokens[:32]) > blocks:
            continue
        cache.admit(0, tokens[:32])
        run(cache, 0, tokens[:32])
        assert not cache.device.is_idle(cache.table(0)[-1][0])
        if cache.blocks_to_admit(tokens) > cache.device.num_available:
            continue
        start = cache.admit(1, tokens)
        assert start == 32
        cache.extend([Span(1, start, len(tokens))])
        cache.check()
        return
    raise AssertionError("it is never admitted")


def test_one_sequence_at_a_time_is_spilled():
    cache = manager([SPILL], blocks=24)
    tokens = list(range(300))
    cache.admit(0, tokens)
    assert len(cache.table(0)[0]) == SPILL.kept // 16
    run(cache, 0, tokens)
    assert cache.num_units(0) == 7  # a later token would find 64 tokens in blocks at most
    assert cache.table(0)[0][:14] == [RELEASED] * 14
    assert RELEASED not in cache.table(0)[0][14:]
    cache.admit(1, tokens)
    run(cache, 1, tokens[:80])
    cache.swap_out([0])
    with pytest.raises(FileTakenError):
        cache.extend([Span(1, 80, 100)])
    cache.free(0)
    cache.extend([Span(1, 80, 100)])
    transfers = cache.take_transfers()
    assert [unit for _, unit in transfers.spills] == [0]
    cache.free(1)
    cache.check_idle()


def test_a_prefix_is_found_as_far_as_it_stays_in_blocks():
    cache = manager([SPILL])
    tokens = list(range(300))
    cache.admit(0, tokens)
    run(cache, 0, tokens)
    cache.free(0)
    assert cache.admit(1, tokens) == SPILL.kept
    run(cache, 1, tokens, start=SPILL.kept)


def test_a_prefix_needs_only_what_the_window_shows():
    cache = manager([FULL, WINDOW], blocks=40)
    tokens = list(range(160))
    cache.admit(0, tokens)
    run(cache, 0, tokens)
    cache.free(0)
    prefix = cache.find_prefix([*tokens, 0])
    assert prefix.num_tokens == 160
    assert [len(hits) for hits in prefix.groups] == [10, 2]
    gone = prefix.groups[1][1].block
    cache.device.forget(cache.device._key_of[gone])
    assert cache.find_prefix([*tokens, 0]).num_tokens == 144  # its window ends before that block


def test_the_end_of_a_prompt_keeps_its_state():
    cache = manager([FULL, STATE])
    tokens = list(range(100))
    cache.admit(0, tokens)
    assert run(cache, 0, tokens) == [32, 64, 96, 100]
    assert cache.find_prefix(tokens).num_tokens == 96
    assert cache.find_prefix([*tokens[:80], 0]).num_tokens == 64
    cache.free(0)
    assert cache.admit(1, tokens) == 96
    kept = list(cache.table(1)[1])
    cache.extend([Span(1, 96, 100)])
    copies = cache.take_transfers().copies
    assert [source for source, _ in copies] == kept  # the cache keeps the old state
    assert not set(cache.table(1)[1]) & set(kept)
    cache.check()


def test_where_prompts_part_their_state_is_kept_the_second_time():
    cache = manager([FULL, STATE])
    common = list(range(48))
    first, second, third = ([*common, *[tail] * 60] for tail in (100, 200, 300))
    cache.admit(0, first)
    assert run(cache, 0, first, step=200) == [96, 108]
    assert cache.admit(1, second) == 0
    assert run(cache, 1, second, step=200) == [48, 96, 108]
    assert cache.admit(2, third) == 48


def test_a_decode_keeps_its_latest_state_only():
    cache = manager([FULL, STATE], blocks=200)
    tokens = list(range(20))
    cache.admit(0, tokens)
    run(cache, 0, tokens)
    for token in range(20, 100):
        tokens.append(token)
        run(cache, 0, tokens, start=token)
    assert cache.find_prefix(tokens).num_tokens == 96
    states = cache.device.num_cached
    assert states <= 2 * 3, "the prompt's and the latest"


def test_a_state_is_given_up_where_no_block_is_left_for_a_copy():
    cache = manager([SMALL_STATE], blocks=1, swap=0)
    tokens = list(range(40))
    cache.admit(0, tokens)
    run(cache, 0, tokens)
    cache.free(0)
    cache.check_idle()


def test_forks_part_with_their_states():
    cache = manager([FULL, STATE])
    tokens = list(range(20))
    cache.admit(0, tokens)
    run(cache, 0, tokens)
    cache.fork(0, 1, 20)
    assert cache.blocks_to_share([0, 1]) == 3 + 1
    cache.extend([Span(0, 20, 21), Span(1, 20, 21)])
    assert not set(cache.table(0)[1]) & set(cache.table(1)[1])
    assert len(cache.take_transfers().copies) == 3 + 1
    cache.check()


@pytest.mark.parametrize("groups", MIXES)
def test_what_swapping_in_takes_is_known_before(groups):
    cache = manager(groups)
    tokens, ids = list(range(70)), [0, 1, 2]
    cache.admit(0, tokens)
    run(cache, 0, tokens)
    for child in ids[1:]:
        cache.fork(0, child, 70)
    cache.swap_out(ids)
    cache.take_transfers()
    told = cache.blocks_to_swap(ids) + cache.blocks_to_share(ids)
    told += sum(cache.blocks_to_reserve(id_, 71) for id_ in ids)
    before = cache.device.num_available
    cache.swap_in(ids)
    cache.take_transfers()
    cache.extend([Span(id_, 70, 71) for id_ in ids])
    cache.take_transfers()
    assert before - cache.device.num_available <= told


class Contents(RuleBasedStateMachine):
    """Tracks each block's contents: tokens by slot, or a piece of the state after some tokens."""

    def __init__(self):
        super().__init__()
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.family: dict[int, int] = {}
        self.swapped: set[int] = set()
        self.next_id = 0

    @initialize(
        groups=st.sampled_from([*MIXES, [SPILL]]),
        blocks=st.integers(12, 40),
        swap=st.integers(0, 40),
    )
    def start(self, groups, blocks, swap):
        self.groups = groups
        self.cache = manager(groups, blocks, swap)
        self.device = [{} for _ in range(blocks)]
        self.swap = [{} for _ in range(swap)]
        self.file = {}

    def transfer(self):
        moves = self.cache.take_transfers()
        for pairs, source, target in (
            (moves.swap_out, self.device, self.swap),
            (moves.swap_in, self.swap, self.device),
            (moves.copies, self.device, self.device),
        ):
            for block, contents in [(b, dict(source[a])) for a, b in pairs]:
                target[block] = contents
        for blocks, unit in moves.spills:
            self.file[unit] = [dict(self.device[block]) for block in blocks]
        for pool, contents in ((self.cache.device, self.device), (self.cache.swap, self.swap)):
            for block in pool._free:
                contents[block] = {}

    def pick(self, data, *, swapped=False):
        """Return a sequence and its forks in the same place."""
        ids = sorted(i for i in self.tokens if (i in self.swapped) is swapped)
        if not ids:
            return []
        family = self.family[data.draw(st.sampled_from(ids))]
        return [i for i in ids if self.family[i] == family]

    @rule(
        front=st.integers(0, 3),
        length=st.integers(0, 3),
        tail=st.lists(st.integers(0, 1), max_size=20),
    )
    def submit(self, front, length, tail):
        tokens = [*[front] * (32 * length), *tail, 9]
        try:
            cached = self.cache.admit(self.next_id, tokens)
        except OutOfBlocksError:
            return
        event(f"cached: {cached > 0}")
        self.transfer()
        self.tokens[self.next_id], self.computed[self.next_id] = tokens, cached
        self.family[self.next_id] = self.next_id
        self.next_id += 1

    @rule(data=st.data(), count=st.integers(1, STEP), token=st.integers(0, 1))
    @precondition(lambda self: len(self.tokens) > len(self.swapped))
    def compute(self, data, count, token):
        ids = self.pick(data)
        spans = []
        for id_ in ids:
            start = self.computed[id_]
            if start == len(self.tokens[id_]):
                self.tokens[id_].append(token)
            end = min(start + count, len(self.tokens[id_]))
            if end > start + 1:
                end = self.cache.pause_before(id_, start, end)
            spans.append(Span(id_, start, end))
        try:
            self.cache.extend(spans)
        except OutOfBlocksError:
            return
        self.transfer()
        for span in spans:
            self.check_reads(span)
        for span in spans:
            self.write(span)
        for id_, _, end in spans:
            self.computed[id_] = end
            self.cache.publish(id_, self.tokens[id_], end)

    @rule(
        data=st.data(),
        draft=st.lists(st.integers(0, 1), min_size=1, max_size=STEP - 1),
        right=st.integers(0, STEP),
    )
    @precondition(lambda self: len(self.tokens) > len(self.swapped))
    def verify(self, data, draft, right):
        """A step computes drafted tokens, and rolls back from the first wrong one on."""
        id_ = self.pick(data)[0]
        tokens, start = self.tokens[id_], self.computed[id_]
        if len(tokens) > start + 1 or any(layers.state_blocks for layers in self.groups):
            return
        before = [*tokens, 1][: start + 1]
        span = Span(id_, start, start + 1 + len(draft))
        try:
            self.cache.extend([span])
        except OutOfBlocksError:
            return
        self.transfer()
        self.check_reads(span)
        self.tokens[id_] = [*before, *draft]
        self.write(span)
        kept = min(start + 1 + right, span.end)
        del self.tokens[id_][kept:]
        self.computed[id_] = kept
        self.cache.roll_back(id_, kept)
        self.cache.publish(id_, self.tokens[id_], kept)
        event(f"drafted tokens are rolled back: {kept < span.end}")

    def check_reads(self, span):
        """Check that the span's first token sees its keys and its state as written."""
        tokens = self.tokens[span.sequence_id]
        for group, layers in enumerate(self.groups):
            blocks = self.cache.table(span.sequence_id)[group]
            if layers.state_blocks:
                for i, block in enumerate(blocks if span.start else ()):
                    assert self.device[block] == {i: tuple(tokens[: span.start])}
                continue
            size = layers.block_size
            first = 0
            if layers.window is not None:
                first = max(0, span.start - layers.window + 1)
            elif layers.chunk is not None:
                first = span.start - span.start % layers.chunk
            for position in range(first, span.start):
                block = blocks[position // size]
                if block == RELEASED and layers.kept is not None:
                    event("a spilled block is read")
                    unit, place = divmod(position // size, layers.unit // size)
                    assert unit < self.cache.num_units(span.sequence_id)
                    contents = self.file[unit][place]
                else:
                    assert block != RELEASED
                    contents = self.device[block]
                assert contents[position % size] == tuple(tokens[: position + 1])

    def write(self, span):
        tokens = self.tokens[span.sequence_id]
        for group, layers in enumerate(self.groups):
            blocks = self.cache.table(span.sequence_id)[group]
            if layers.state_blocks:
                for i, block in enumerate(blocks):
                    assert self.cache.device.references(block) == 1
                    assert not (span.start and self.cache.device.is_published(block))
                    self.device[block] = {i: tuple(tokens[: span.end])}
                continue
            for position in range(span.start, span.end):
                block = blocks[position // layers.block_size]
                assert self.cache.device.references(block) == 1
                assert not self.cache.device.is_published(block)
                self.device[block][position % layers.block_size] = tuple(tokens[: position + 1])

    @rule(data=st.data(), swapped=st.booleans())
    def fork(self, data, swapped):
        for id_ in self.pick(data, swapped=swapped)[:1]:
            if not self.computed[id_] or id_ == self.cache.spilled.id:
                continue
            child, self.next_id = self.next_id, self.next_id + 1
            self.cache.fork(id_, child, self.computed[id_])
            self.tokens[child] = self.tokens[id_][: self.computed[id_]]
            self.computed[child], self.family[child] = self.computed[id_], self.family[id_]
            if id_ in self.swapped:
                self.swapped.add(child)

    @rule(data=st.data(), swapped=st.booleans())
    def free(self, data, swapped):
        for id_ in self.pick(data, swapped=swapped)[:2]:
            self.drop(id_)

    def drop(self, id_):
        self.cache.free(id_)
        self.swapped.discard(id_)
        del self.tokens[id_], self.computed[id_], self.family[id_]

    @rule(data=st.data())
    @precondition(lambda self: len(self.tokens) > len(self.swapped))
    def swap_out(self, data):
        ids = self.pick(data)
        for id_ in ids:
            self.cache.trim(id_, self.computed[id_])
        try:
            self.cache.swap_out(ids)
        except OutOfBlocksError:
            return
        self.transfer()
        self.swapped.update(ids)

    @rule(data=st.data())
    @precondition(lambda self: self.swapped)
    def swap_in(self, data):
        ids = self.pick(data, swapped=True)
        try:
            self.cache.swap_in(ids)
        except OutOfBlocksError:
            return
        self.transfer()
        self.swapped.difference_update(ids)

    @invariant()
    def books_balance(self):
        if hasattr(self, "cache"):
            self.cache.check()

    def teardown(self):
        if hasattr(self, "cache"):
            for id_ in list(self.tokens):
                self.drop(id_)
            self.transfer()
            self.cache.check_idle()


TestContents = Contents.TestCase
TestContents.settings = settings(
    max_examples=90,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("groups", MIXES)
def test_what_is_swapped_returns_whole(groups):
    cache = manager(groups)
    tokens = list(range(130))
    cache.admit(0, tokens)
    run(cache, 0, tokens)
    held = [sum(block != RELEASED for block in blocks) for blocks in cache.table(0)]
    cache.swap_out([0])
    assert len(cache.take_transfers().swap_out) == sum(held) == cache.blocks_to_swap([0])
    cache.swap_in([0])
    assert [sum(block != RELEASED for block in blocks) for blocks in cache.table(0)] == held
    cache.take_transfers()
    cache.free(0)
    cache.check_idle()
