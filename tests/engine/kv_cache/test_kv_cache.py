"""The KV cache's block accounting against a simple model of every block's contents."""

import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.common.kv_cache.layer_groups import LayerGroup
from octavo.common.kv_cache.prefix_hash import ROOT_KEY, block_key
from octavo.engine.kv_cache import KVCacheManager, OutOfBlocksError, Span
from octavo.engine.kv_cache.block_pool import BlockPool

BLOCK_SIZE = 4


def manager(num_blocks=8, num_swap_blocks=8, prefix_caching=True):
    return KVCacheManager(
        num_blocks=num_blocks,
        groups=[LayerGroup(BLOCK_SIZE)],
        num_swap_blocks=num_swap_blocks,
        prefix_caching=prefix_caching,
        step_tokens=64,
    )


def table(cache, sequence_id):
    """Return the blocks of the only layer group."""
    (blocks,) = cache.table(sequence_id)
    return blocks


def found(cache, tokens, salt=""):
    """Return the only layer group's blocks that hold a prompt's prefix."""
    (hits,) = cache.find_prefix(tokens, salt).groups
    return hits


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


def test_unlike_salts_share_nothing():
    cache = manager(num_blocks=16)
    tokens = list(range(9))
    cache.admit(0, tokens, salt="a")
    cache.publish(0, tokens, 9)
    cache.fork(0, 1, 9)
    cache.publish(1, tokens, 9)
    for other in ("b", ""):
        assert found(cache, tokens, other) == []
    assert cache.blocks_to_admit(tokens, salt="b") == 3
    assert cache.admit(2, tokens, salt="b") == 0
    assert cache.admit(3, tokens, salt="a") == 8
    assert table(cache, 3)[:2] == table(cache, 0)[:2]
    assert not set(table(cache, 2)) & set(table(cache, 0))
    cache.free(2)
    cache.swap_out([3])  # the same in swap space
    assert [len(found(cache, tokens, salt)) for salt in ("a", "b", "")] == [2, 0, 0]


def test_cached_blocks_are_evicted_from_the_end_of_the_oldest_prefix():
    cache = manager(num_blocks=4, num_swap_blocks=0)
    tokens = list(range(12))
    cache.admit(0, tokens)
    cache.publish(0, tokens, 12)
    cache.free(0)
    cache.admit(1, [99] * 8)  # uses the free block and evicts one
    assert len(found(cache, [*tokens, 0])) == 2


def test_a_fork_copies_on_write_and_the_last_holder_writes_in_place():
    cache = manager()
    cache.admit(0, [1] * 6)
    cache.fork(0, 1, 6)
    cache.fork(0, 2, 6)
    shared = table(cache, 0)[1]
    cache.extend([Span(0, 6, 7), Span(1, 6, 7), Span(2, 6, 7)])
    copies = cache.take_transfers().copies
    assert [source for source, _ in copies] == [shared, shared]
    assert len({table(cache, i)[1] for i in range(3)}) == 3
    assert len({table(cache, i)[0] for i in range(3)}) == 1
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
    cache.extend(spans[:3])  # fits exactly: the last writer keeps the original
    assert cache.device.num_free == 0
    cache.check()


def test_blocks_are_appended_to_all_tables_or_to_none():
    cache = manager(num_blocks=6)
    for id_ in (0, 1):
        cache.admit(id_, [id_] * 4)
    tables = [cache.own_table(id_, 64) for id_ in (0, 1)]
    assert not cache.append_blocks(tables, [4, 4], spare=3)  # 4 are free
    assert cache.device.num_in_use == 2
    assert cache.append_blocks(tables, [4, 4], spare=2)
    assert len({block for own in tables for block in own.groups[0]}) == 4
    # The reserve is not for a block that the table has already.
    assert not cache.append_blocks(tables, [8, 4], spare=0)
    for own in tables:
        own.num_tokens = 5
    cache.check()


def test_an_appended_block_is_offloaded_like_any_other():
    cache = manager(num_blocks=3)
    prompt = list(range(5))
    for id_ in range(2):  # the second one hits
        cache.admit(id_, prompt)
        cache.publish(id_, prompt, 5)
        cache.free(id_)
    cache.admit(2, [9] * 8)
    cached = found(cache, prompt)[0].block
    assert cache.append_blocks([cache.own_table(2, 64)], [8], spare=0)
    assert table(cache, 2)[2] == cached
    assert [block for block, _ in cache.take_transfers().swap_out] == [cached]


def test_what_leaves_together_lies_side_by_side():
    cache = manager(num_blocks=40, num_swap_blocks=20)
    for id_ in range(5):
        cache.admit(id_, [id_] * 16)  # of 4 blocks each
    cache.swap_out([0])
    cache.swap_out([1])
    cache.swap_out([2])
    cache.free(0)
    cache.free(2)  # 4 are free, 4 taken, 12 free
    cache.take_transfers()
    cache.admit(5, [5] * 32)
    cache.swap_out([5])
    places = [place for _, place in cache.take_transfers().swap_out]
    assert places == list(range(8, 16))
    cache.swap_out([3])
    assert [place for _, place in cache.take_transfers().swap_out] == list(range(4))
    cache.check()


def test_what_leaves_together_goes_to_the_longest_runs_where_none_is_long_enough():
    pool = BlockPool(10)
    assert pool.allocate_together(10) == list(range(10))
    for block in (0, 2, 3, 5, 6, 7, 9):
        pool.release(block)
    assert pool.allocate_together(5) == [5, 6, 7, 2, 3]
    with pytest.raises(OutOfBlocksError):
        pool.allocate_together(3)
    assert pool.num_free == 2
    pool.check()


def test_a_swapped_gang_still_shares_its_blocks():
    cache = manager()
    cache.admit(0, [1] * 8)
    cache.fork(0, 1, 8)
    assert cache.blocks_to_swap([0, 1]) == 2
    cache.swap_out([0, 1])
    assert (cache.device.num_in_use, cache.swap.num_in_use) == (0, 2)
    cache.take_transfers()
    cache.swap_in([0, 1])
    assert cache.swap.num_in_use == 2  # must not be overwritten before it is read
    assert len(cache.take_transfers().swap_in) == 2
    assert table(cache, 0) == table(cache, 1)
    assert (cache.device.num_in_use, cache.swap.num_in_use) == (2, 0)
    cache.check()


def test_swap_out_without_room_changes_nothing():
    cache = manager(num_swap_blocks=1)
    cache.admit(0, [1] * 8)
    with pytest.raises(OutOfBlocksError):
        cache.swap_out([0])
    assert len(table(cache, 0)) == 2
    assert not cache.take_transfers()
    cache.check()


def test_what_is_shared_and_what_is_wasted_is_counted():
    cache = manager()
    cache.admit(0, [1] * 6)
    assert (cache.device.num_shared, cache.wasted_slots) == (0, 2)
    for child in (1, 2):
        cache.fork(0, child, 6)
    assert (cache.device.num_shared, cache.wasted_slots) == (2, 2)
    cache.extend([Span(i, 6, 7) for i in range(3)])  # each has its own last block of 3 tokens
    assert (cache.device.num_shared, cache.wasted_slots) == (1, 3)
    cache.swap_out([1])
    assert (cache.device.num_shared, cache.wasted_slots) == (1, 2)
    cache.free(2)
    cache.trim(0, 4)
    assert (cache.device.num_shared, cache.wasted_slots) == (0, 0)


def cached_prefix(cache, tokens, *, hit=True):
    """Leave a prompt's full blocks in the device's prefix cache.

    With `hit`, another prompt has hit each: that takes one more block.
    """
    cache.admit(99, tokens)
    cache.publish(99, tokens, len(tokens))
    cache.free(99)
    if hit:
        cache.admit(99, [*tokens, 0])
        cache.free(99)


def test_an_evicted_prefix_that_nobody_hit_is_gone():
    cache = manager(num_blocks=4)
    cached_prefix(cache, list(range(12)), hit=False)
    cache.admit(1, list(range(5)))  # the first block is found, but not the last two
    cache.free(1)
    cache.admit(2, [99] * 13)
    assert len(cache.take_transfers().swap_out) == 1
    assert [hit.swapped for hit in found(cache, list(range(13)))] == [True]
    cache.check()


def test_a_lookup_is_no_hit_and_neither_is_an_admission_that_fails():
    cache = manager(num_blocks=4)
    cached_prefix(cache, list(range(8)), hit=False)
    assert cache.blocks_to_admit([*range(8), 0]) == 3
    with pytest.raises(OutOfBlocksError):
        cache.admit(1, [*range(8), *[0] * 12])
    cache.admit(2, [99] * 16)
    assert not cache.take_transfers()


def test_a_prefix_that_was_hit_stays_so_until_it_is_nowhere():
    cache = manager(num_blocks=5, num_swap_blocks=3)

    def fill_device():
        cache.admit(90, [99] * 20, reuse=False)
        cache.free(90)
        return cache.take_transfers().swap_out

    def fill_swap_space():
        cache.admit(91, [98] * 12, reuse=False)
        cache.swap_out([91])
        cache.free(91)
        cache.take_transfers()

    tokens = list(range(8))
    cached_prefix(cache, tokens)
    cache.admit(1, [*tokens, 0])
    cache.swap_out([1])
    assert len(fill_device()) == 3  # only the sequence's: it is in swap space now
    cache.swap_in([1])
    cache.take_transfers()
    cache.free(1)
    fill_swap_space()
    assert len(fill_device()) == 2
    fill_swap_space()
    assert found(cache, [*tokens, 0]) == []
    cached_prefix(cache, tokens, hit=False)  # computed again, it is an ordinary block
    assert not fill_device()
    cache.check()


def test_an_evicted_prefix_falls_to_swap_space_and_returns_by_copy():
    cache = manager(num_blocks=4, num_swap_blocks=4)
    tokens = list(range(12))
    cached_prefix(cache, tokens)
    blocks = [hit.block for hit in found(cache, [*tokens, 0])]
    cache.admit(1, [99] * 13)  # evicts all three
    offloaded = cache.take_transfers().swap_out
    assert [block for block, _ in offloaded] == blocks[::-1]
    assert cache.swap.num_cached == 3
    cache.free(1)
    assert cache.admit(2, [*tokens, 0]) == 12
    returned = cache.take_transfers()
    places = dict(offloaded)
    assert returned.swap_in == [
        (places[old], new) for old, new in zip(blocks, table(cache, 2), strict=False)
    ]
    assert (cache.moves.counters["offloaded_blocks"], cache.moves.counters["restored_blocks"]) == (
        3,
        3,
    )
    cache.free(2)
    cache.admit(3, [98] * 13)
    assert not cache.take_transfers().swap_out  # swap space still has them
    cache.check()


def test_preempted_sequences_evict_prefixes_from_swap_space_and_never_the_reverse():
    cache = manager(num_blocks=6, num_swap_blocks=3)
    cache.admit(0, [5] * 8)
    cached_prefix(cache, list(range(12)))
    cache.admit(1, [99] * 16)
    assert cache.swap.num_cached == 3
    cache.swap_out([0])  # in the same step: two of the blocks are no longer offloaded
    moves = cache.take_transfers()
    assert len(moves.swap_out) == len({kept for _, kept in moves.swap_out}) == 3
    assert (cache.swap.num_in_use, cache.swap.num_cached) == (2, 1)
    cache.free(1)
    cached_prefix(cache, list(range(40, 60)))
    cache.admit(2, [98] * 24)
    assert cache.swap.num_in_use == 2
    cache.check()


def test_a_swap_block_is_not_written_in_the_step_that_reads_it():
    cache = manager(num_blocks=4, num_swap_blocks=2)
    cache.admit(0, [5] * 8)
    cache.swap_out([0])
    cache.take_transfers()
    cached_prefix(cache, list(range(12)))
    cache.swap_in([0])  # evicts a block, which swap space has no room for
    cache.admit(1, [6] * 8)  # nor for these two
    moves = cache.take_transfers()
    assert (len(moves.swap_in), moves.swap_out) == (2, [])


def test_nor_is_one_that_a_prefix_returns_from():
    cache = manager(num_blocks=4, num_swap_blocks=1)
    cached_prefix(cache, list(range(4)))
    cache.admit(1, [99] * 16)
    assert len(cache.take_transfers().swap_out) == 1
    cache.free(1)
    cached_prefix(cache, list(range(40, 48)))
    assert cache.admit(2, list(range(5))) == 4
    cache.admit(3, [6] * 8)  # evicts two blocks, which swap space has no room for
    moves = cache.take_transfers()
    assert (len(moves.swap_in), moves.swap_out) == (1, [])


def test_what_a_pool_has_already_is_not_copied_again():
    cache = manager()
    tokens = list(range(10))
    cache.admit(0, tokens)
    cache.publish(0, tokens, 10)
    cache.swap_out([0])
    assert len(cache.take_transfers().swap_out) == 3
    cache.swap_in([0])
    assert len(cache.take_transfers().swap_in) == 1  # the device kept the full blocks
    cache.swap_out([0])
    assert len(cache.take_transfers().swap_out) == 1  # swap space did, too
    cache.check()


class FaultError(Exception):
    """Raised on purpose."""


def break_call(obj, name, count):
    """Make the `count`-th next call of a method fail before it does anything."""
    method, calls = getattr(obj, name), itertools.count()

    def call(*arguments):
        if next(calls) == count:
            raise FaultError
        return method(*arguments)

    setattr(obj, name, call)


PROMPTS = st.builds(
    lambda blocks, end: [*itertools.chain(*blocks), *end],
    st.lists(st.sampled_from([[0] * BLOCK_SIZE, [1] * BLOCK_SIZE]), max_size=4),
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
)
"""Prompts, many with common prefixes."""


def on(place):
    """Return a rule's precondition: some sequence exists, on the `device` or `swapped`."""
    if place == "swapped":
        return precondition(lambda self: self.swapped)
    return precondition(lambda self: len(self.tokens) > len(self.swapped))


class Contents(RuleBasedStateMachine):
    """Tracks each physical block's contents, and reads them back through the block tables.

    A block's contents are a list of token ids by slot. The model writes them only where the manager
    allows it, and does the manager's copies as late as the scheduler would, so that copies of one
    step must not conflict.
    """

    def __init__(self):
        super().__init__()
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.family: dict[int, int] = {}  # forks are swapped and cancelled with their root parent
        self.swapped: set[int] = set()
        self.fresh: set[int] = set()  # sequences that got blocks since the last copies
        self.named: dict[bytes, list[int]] = {}  # what must be found under a key
        self.hit: set[bytes] = set()  # of these, those that a sequence was admitted with
        self.next_id = 0

    @initialize(
        blocks=st.integers(4, 12),
        swap=st.integers(0, 12),
        prefix=st.sampled_from([True, True, False]),
        prompts=st.lists(PROMPTS, min_size=1, max_size=4),
    )
    def start(self, blocks, swap, prefix, prompts):
        self.cache = manager(blocks, swap, prefix)
        self.device = [[None] * BLOCK_SIZE for _ in range(blocks)]
        self.swap = [[None] * BLOCK_SIZE for _ in range(swap)]
        for prompt in prompts:
            self.submit(prompt)
            self.run(list(self.tokens), len(prompt))

    # The executor's part.

    def transfer(self):
        self.forget_what_is_gone()
        moves = self.cache.take_transfers()
        event(f"prefixes offloaded: {self.cache.moves.counters['offloaded_blocks'] > 0}")
        event(f"prefixes restored: {self.cache.moves.counters['restored_blocks'] > 0}")
        for pairs, source, target in (
            (moves.swap_out, self.device, self.swap),
            (moves.swap_in, self.swap, self.device),
            (moves.copies, self.device, self.device),
        ):
            written = [b for _, b in pairs]
            assert len(set(written)) == len(written), "a block is written twice at once"
            for block, contents in [(b, list(source[a])) for a, b in pairs]:
                target[block] = contents
        self.fresh.clear()
        for pool, contents in ((self.cache.device, self.device), (self.cache.swap, self.swap)):
            for block in pool._free:
                contents[block] = [None] * BLOCK_SIZE  # its next owner may write anything
            for key, tokens in self.named.items():
                if (block := pool.find(key)) is not None:
                    assert contents[block] == tokens, "a published block holds something else"

    def forget_what_is_gone(self):
        """A prefix that neither memory holds must be hit again to count."""
        pools = self.cache.device, self.cache.swap
        self.hit = {key for key in self.hit if any(pool.find(key) is not None for pool in pools)}

    def idle_hits(self):
        """Return the prefixes on the device that were hit and that `evict` offloads."""
        device = self.cache.device
        return [
            key
            for key in self.hit
            if (block := device.find(key)) is not None and device.is_idle(block)
        ]

    def write(self, id_, end):
        for position in range(self.computed[id_], end):
            block = table(self.cache, id_)[position // BLOCK_SIZE]
            assert self.cache.device.references(block) == 1, "a shared block is written"
            self.device[block][position % BLOCK_SIZE] = self.tokens[id_][position]
        self.computed[id_] = end
        self.cache.publish(id_, self.tokens[id_], end)
        self.named.update(self.keys(self.tokens[id_][:end]))

    @staticmethod
    def keys(tokens):
        """Return each full block's key and tokens."""
        key, named = ROOT_KEY, {}
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            block = tokens[start : start + BLOCK_SIZE]
            key = block_key(key, block)
            named[key] = block
        return named

    # Choices.

    def pick(self, data, *, swapped=False):
        ids = [i for i in self.tokens if (i in self.swapped) is swapped]
        return data.draw(st.sampled_from(sorted(ids))) if ids else None

    def gang(self, data, *, swapped=False):
        """Return a sequence and all its forks in the same place."""
        if (one := self.pick(data, swapped=swapped)) is None:
            return []
        return [
            i
            for i in self.tokens
            if self.family[i] == self.family[one] and (i in self.swapped) is swapped
        ]

    def settle(self, ids):
        """Do the copies first if some of `ids` have just got blocks."""
        if self.fresh & set(ids):
            self.transfer()

    def drop(self, id_):
        self.cache.free(id_)
        self.swapped.discard(id_)
        del self.tokens[id_], self.computed[id_], self.family[id_]

    # What happens.

    @rule(tokens=PROMPTS)
    def submit(self, tokens):
        try:
            cached = self.cache.admit(self.next_id, tokens)
        except OutOfBlocksError:
            return
        self.hit.update(self.keys(tokens[:cached]))
        self.tokens[self.next_id] = tokens
        self.computed[self.next_id] = cached
        self.family[self.next_id] = self.next_id
        self.fresh.add(self.next_id)
        self.next_id += 1

    @rule(data=st.data(), count=st.integers(1, 9), token=st.none() | st.integers(0, 1))
    @on("device")
    def compute(self, data, count, token):
        """Run a step with a gang, perhaps after sampling a token."""
        ids = self.gang(data)
        for id_ in ids if token is not None else ():
            self.tokens[id_].append(token)
        self.run(ids, count)

    def run(self, ids, count):
        spans = [
            Span(i, self.computed[i], end)
            for i in ids
            if (end := min(self.computed[i] + count, len(self.tokens[i]))) > self.computed[i]
        ]
        try:
            self.cache.extend(spans)
        except OutOfBlocksError:
            return
        self.transfer()
        for id_, _, end in spans:
            self.write(id_, end)

    @rule(data=st.data(), token=st.integers(0, 1))
    @on("device")
    def append(self, data, token):
        self.tokens[self.pick(data)].append(token)

    @rule(data=st.data(), swapped=st.booleans(), count=st.integers(1, 3))
    @precondition(lambda self: self.tokens)
    def fork(self, data, swapped, count):
        if (id_ := self.pick(data, swapped=swapped)) is None:
            return
        for _ in range(count if self.computed[id_] else 0):
            child, self.next_id = self.next_id, self.next_id + 1
            self.cache.fork(id_, child, self.computed[id_])
            self.tokens[child] = [*self.tokens[id_][: self.computed[id_]], count % 2]
            self.computed[child] = self.computed[id_]
            self.family[child] = self.family[id_]
            for where in (self.fresh, self.swapped):
                if id_ in where:
                    where.add(child)

    @rule(data=st.data())
    @on("device")
    def free(self, data):
        id_ = self.pick(data)
        self.settle([id_])
        self.drop(id_)

    @rule(data=st.data(), swapped=st.booleans(), evict=st.booleans())
    def cancel(self, data, swapped, evict):
        ids = self.gang(data, swapped=swapped)
        self.settle(ids)
        for id_ in ids:
            self.drop(id_)
        if evict:
            self.evict()

    @rule()
    def evict(self):
        """Allocate and free every idle device block: prefixes that were hit are offloaded."""
        number, self.next_id = self.next_id, self.next_id + 1
        falling, room = self.idle_hits(), self.cache.swap.num_available
        before = set(self.found(self.cache.swap))
        self.cache.admit(number, [0] * (BLOCK_SIZE * self.cache.device.num_available), reuse=False)
        self.cache.free(number)
        kept = set(self.found(self.cache.swap))
        event(f"prefixes that were hit are evicted: {bool(falling)}")
        assert kept <= before | set(falling), "a prefix fell that nobody hit"
        if len(falling) <= room:
            assert kept >= set(falling), "a prefix that was hit is gone and there was room"

    def found(self, pool):
        return [key for key in self.named if pool.find(key) is not None]

    @rule(data=st.data())
    @on("device")
    def swap_out(self, data):
        ids = self.gang(data)
        self.settle(ids)
        for id_ in ids:
            self.cache.trim(id_, self.computed[id_])
        try:
            self.cache.swap_out(ids)
        except OutOfBlocksError:
            return
        self.swapped.update(ids)
        self.fresh.update(ids)

    @rule(data=st.data())
    @on("swapped")
    def swap_in(self, data):
        ids = self.gang(data, swapped=True)
        self.settle(ids)
        try:
            self.cache.swap_in(ids)
        except OutOfBlocksError:
            return
        self.swapped.difference_update(ids)
        self.fresh.update(ids)

    @rule(
        data=st.data(),
        call=st.sampled_from(
            [
                "allocate",
                "allocate_together",
                "share",
                "release",
                "find",
                "is_idle",
                "reserve_cached",
            ]
        ),
        of_device=st.booleans(),
        count=st.integers(0, 3),
    )
    @precondition(lambda self: self.tokens)
    def fault_in_a_swap(self, data, call, of_device, count):
        """A call inside a swap fails: the swap leaves no trace."""
        ids = self.gang(data, swapped=data.draw(st.booleans())) or list(self.tokens)
        swapped = ids[0] in self.swapped
        ids = [i for i in ids if (i in self.swapped) is swapped]
        self.settle(ids)
        before = {i: list(self.cache._tables[i].groups[0]) for i in self.tokens}
        pool = self.cache.device if of_device else self.cache.swap
        break_call(pool, call, count)
        try:
            (self.cache.swap_in if swapped else self.cache.swap_out)(ids)
        except (FaultError, OutOfBlocksError) as error:
            event(f"fault: {isinstance(error, FaultError)}")
            assert before == {i: self.cache._tables[i].groups[0] for i in self.tokens}
        else:
            self.swapped ^= set(ids)
            self.fresh.update(ids)
        finally:
            delattr(pool, call)

    @rule(data=st.data())
    @precondition(lambda self: len(self.tokens) > 2)
    def fault_in_the_copies(self, data):
        """The step fails, with some of its copies done: old contents are not trusted afterwards."""
        (self.swap_in if self.swapped else self.swap_out)(data)
        for source, target in self.cache.take_transfers().swap_out[::2]:
            self.swap[target] = list(self.device[source])
        for id_ in list(self.tokens):
            self.drop(id_)
        self.fresh.clear()
        self.cache.forget_contents()
        self.cache.check_idle()
        for pool in (self.cache.device, self.cache.swap):
            assert pool.num_free == pool.num_blocks

    # Invariants.

    @invariant()
    def books_balance(self):
        if hasattr(self, "cache"):
            self.cache.check()

    @invariant()
    def what_was_hit_counts_as_hit_wherever_it_is(self):
        if hasattr(self, "cache"):
            self.forget_what_is_gone()
            for pool in (self.cache.device, self.cache.swap):
                for key in self.found(pool):
                    assert pool.was_hit(key) is (key in self.hit)

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for id_, tokens in self.tokens.items():
            if id_ not in self.fresh:
                memory = self.swap if id_ in self.swapped else self.device
                read = [t for block in self.cache._tables[id_].groups[0] for t in memory[block]]
                assert read[: self.computed[id_]] == tokens[: self.computed[id_]]

    @invariant()
    def blocks_are_held_as_often_as_counted(self):
        if hasattr(self, "cache"):
            held = Counter(
                block
                for id_ in self.tokens
                if id_ not in self.swapped
                for block in table(self.cache, id_)
            )
            assert self.cache.device.num_in_use == len(held)
            shared = sum(count > 1 for count in held.values())
            assert self.cache.device.num_shared == shared

    @invariant()
    def less_than_a_block_is_wasted(self):
        if hasattr(self, "cache"):
            assert 0 <= self.cache.wasted_slots <= (BLOCK_SIZE - 1) * len(self.tokens)

    def teardown(self):
        if hasattr(self, "cache"):
            self.transfer()
            for id_ in list(self.tokens):
                self.drop(id_)
            self.cache.check_idle()


TestContents = Contents.TestCase
TestContents.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
