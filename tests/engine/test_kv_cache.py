"""The KV cache's books against a plain model of what every block holds."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv_cache import KVCacheManager, OutOfBlocksError, Span

BLOCK_SIZE = 4


def manager(num_blocks=8, num_swap_blocks=8, prefix_caching=True):
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_swap_blocks=num_swap_blocks,
        prefix_caching=prefix_caching,
    )


def test_a_table_wastes_less_than_a_block():
    cache = manager()
    cache.admit(0, [1] * 5)
    assert len(cache.table(0)) == 2
    cache.extend([Span(0, 5, 9)])
    assert len(cache.table(0)) == 3
    cache.check()


def test_admission_is_all_or_nothing():
    cache = manager(num_blocks=2)
    with pytest.raises(OutOfBlocksError, match="3 blocks needed, 2 available"):
        cache.admit(0, [1] * 9)
    assert cache.device.num_free == 2
    assert not cache.holds(0)


def test_a_prefix_is_found_after_its_owner_is_gone_and_never_whole():
    cache = manager()
    tokens = list(range(8))
    cache.admit(0, tokens)
    cache.publish(0, tokens, 8)
    cache.free(0)
    assert cache.device.num_cached == 2
    assert cache.admit(1, tokens) == 4  # the last token's logits must be computed
    assert cache.admit(2, [*tokens, 8]) == 8
    cache.check()


def test_equal_tokens_after_different_prefixes_are_not_shared():
    cache = manager()
    cache.admit(0, [1, 1, 1, 1, 9, 9, 9, 9, 0])
    cache.publish(0, [1, 1, 1, 1, 9, 9, 9, 9, 0], 8)
    assert cache.admit(1, [2, 2, 2, 2, 9, 9, 9, 9, 0]) == 0


def test_cached_blocks_are_evicted_from_the_end_of_the_oldest_prefix():
    cache = manager(num_blocks=4)
    tokens = list(range(12))
    cache.admit(0, tokens)
    cache.publish(0, tokens, 12)
    cache.free(0)
    cache.admit(1, [99] * 8)  # takes the free block and evicts one
    assert len(cache.find_prefix([*tokens, 0])) == 2


def test_a_fork_copies_on_write_and_the_last_holder_writes_in_place():
    cache = manager()
    cache.admit(0, [1] * 6)
    cache.fork(0, 1, 6)
    cache.fork(0, 2, 6)
    shared = cache.table(0)[1]
    cache.extend([Span(0, 6, 7), Span(1, 6, 7), Span(2, 6, 7)])
    copies = cache.take_transfers().copies
    assert [source for source, _ in copies] == [shared, shared]
    assert len({cache.table(i)[1] for i in range(3)}) == 3
    assert len({cache.table(i)[0] for i in range(3)}) == 1
    assert cache.device.num_in_use == 4
    cache.check()


def test_a_gang_is_extended_whole_or_not_at_all():
    cache = manager(num_blocks=4)
    cache.admit(0, [1] * 6)
    for child in (1, 2, 3):
        cache.fork(0, child, 6)
    spans = [Span(i, 6, 7) for i in range(4)]
    with pytest.raises(OutOfBlocksError):  # three copies needed, two blocks free
        cache.extend(spans)
    assert not cache.take_transfers()
    assert cache.device.num_in_use == 2
    cache.free(3)
    cache.extend(spans[:3])  # exactly fits: the last writer keeps the original
    assert cache.device.num_free == 0
    cache.check()


def test_a_swapped_gang_still_shares_its_blocks():
    cache = manager()
    cache.admit(0, [1] * 8)
    cache.fork(0, 1, 8)
    assert cache.blocks_to_swap([0, 1]) == 2
    cache.swap_out([0, 1])
    assert (cache.device.num_in_use, cache.swap.num_in_use) == (0, 2)
    cache.swap_in([0, 1])
    assert cache.table(0) == cache.table(1)
    assert (cache.device.num_in_use, cache.swap.num_in_use) == (2, 0)
    cache.check()


def test_swap_out_without_room_changes_nothing():
    cache = manager(num_swap_blocks=1)
    cache.admit(0, [1] * 8)
    with pytest.raises(OutOfBlocksError):
        cache.swap_out([0])
    assert len(cache.table(0)) == 2
    assert not cache.take_transfers()
    cache.check()


def test_what_is_shared_and_what_is_wasted_is_counted():
    cache = manager()
    cache.admit(0, [1] * 6)
    assert (cache.stats.shared_blocks, cache.stats.wasted_slots) == (0, 2)
    for child in (1, 2):
        cache.fork(0, child, 6)
    assert (cache.stats.shared_blocks, cache.stats.wasted_slots) == (2, 2)
    cache.extend([Span(i, 6, 7) for i in range(3)])  # each its own last block of 3 tokens
    assert (cache.stats.shared_blocks, cache.stats.wasted_slots) == (1, 3)
    cache.swap_out([1])
    assert (cache.stats.shared_blocks, cache.stats.wasted_slots) == (1, 2)
    cache.free(2)
    cache.trim(0, 4)
    assert (cache.stats.shared_blocks, cache.stats.wasted_slots) == (0, 0)


class Contents(RuleBasedStateMachine):
    """Follows what each physical block holds, and reads it back through the tables.

    A block's contents are a list of token ids by slot; the model writes them
    only where the manager says a sequence may, and does the copies it orders.
    """

    def __init__(self):
        super().__init__()
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.swapped: set[int] = set()
        self.next_id = 0

    @initialize(blocks=st.integers(4, 12), swap=st.integers(0, 6), prefix=st.booleans())
    def start(self, blocks, swap, prefix):
        self.cache = manager(blocks, swap, prefix)
        self.device = [[None] * BLOCK_SIZE for _ in range(blocks)]
        self.swap = [[None] * BLOCK_SIZE for _ in range(swap)]

    def transfer(self):
        moves = self.cache.take_transfers()
        for source, target in moves.swap_out:
            self.swap[target] = list(self.device[source])
        for source, target in moves.swap_in:
            self.device[target] = list(self.swap[source])
        for source, target in moves.copies:
            self.device[target] = list(self.device[source])

    def pick(self, data, *, swapped=False):
        ids = [i for i in self.tokens if (i in self.swapped) is swapped]
        return data.draw(st.sampled_from(sorted(ids))) if ids else None

    def compute(self, id_, end):
        for position in range(self.computed[id_], end):
            block = self.cache.table(id_)[position // BLOCK_SIZE]
            assert self.cache.device.references(block) == 1, "a shared block is written"
            self.device[block][position % BLOCK_SIZE] = self.tokens[id_][position]
        self.computed[id_] = end
        self.cache.publish(id_, self.tokens[id_], end)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def admit(self, tokens):
        try:
            cached = self.cache.admit(self.next_id, tokens)
        except OutOfBlocksError:
            return
        self.tokens[self.next_id] = tokens
        self.computed[self.next_id] = cached
        self.next_id += 1

    @rule(data=st.data(), count=st.integers(1, 9))
    def compute_chunk(self, data, count):
        if (id_ := self.pick(data)) is not None:
            start = self.computed[id_]
            end = min(start + count, len(self.tokens[id_]))
            try:
                self.cache.extend([Span(id_, start, end)])
            except OutOfBlocksError:
                return
            self.transfer()
            self.compute(id_, end)

    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data, token):
        if (id_ := self.pick(data)) is not None:
            self.tokens[id_].append(token)

    @rule(data=st.data())
    def fork(self, data):
        if (id_ := self.pick(data)) is not None and self.computed[id_]:
            child, self.next_id = self.next_id, self.next_id + 1
            self.cache.fork(id_, child, self.computed[id_])
            self.tokens[child] = self.tokens[id_][: self.computed[id_]]
            self.computed[child] = self.computed[id_]

    @rule(data=st.data(), swapped=st.booleans())
    def free(self, data, swapped):
        if (id_ := self.pick(data, swapped=swapped)) is not None:
            self.cache.free(id_)
            self.swapped.discard(id_)
            del self.tokens[id_], self.computed[id_]

    @rule(data=st.data())
    def swap_out(self, data):
        if (id_ := self.pick(data)) is not None:
            self.cache.trim(id_, self.computed[id_])
            try:
                self.cache.swap_out([id_])
            except OutOfBlocksError:
                return
            self.transfer()
            self.swapped.add(id_)

    @rule(data=st.data())
    @precondition(lambda self: self.swapped)
    def swap_in(self, data):
        id_ = self.pick(data, swapped=True)
        try:
            self.cache.swap_in([id_])
        except OutOfBlocksError:
            return
        self.transfer()
        self.swapped.discard(id_)

    @invariant()
    def books_balance(self):
        if hasattr(self, "cache"):
            self.cache.check()

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for id_, tokens in self.tokens.items():
            if id_ in self.swapped:
                continue
            table = self.cache.table(id_)
            read = [self.device[block][slot] for block in table for slot in range(BLOCK_SIZE)]
            assert read[: self.computed[id_]] == tokens[: self.computed[id_]]

    @invariant()
    def blocks_are_held_as_often_as_counted(self):
        if hasattr(self, "cache"):
            held = Counter(
                block
                for id_ in self.tokens
                if id_ not in self.swapped
                for block in self.cache.table(id_)
            )
            assert self.cache.device.num_in_use == len(held)
            shared = sum(count > 1 for count in held.values())
            assert self.cache.stats.shared_blocks == shared

    @invariant()
    def less_than_a_block_is_wasted(self):
        if hasattr(self, "cache"):
            assert 0 <= self.cache.stats.wasted_slots <= (BLOCK_SIZE - 1) * len(self.tokens)

    def teardown(self):
        for id_ in self.tokens:
            self.cache.free(id_)
        if hasattr(self, "cache"):
            self.cache.check_idle()


TestContents = Contents.TestCase
TestContents.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
