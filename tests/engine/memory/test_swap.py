"""Swaps deliver their blocks, however slow the streams are."""

import itertools
import random
from collections import deque
from functools import partial

import pytest
import torch

from octavo.engine.kv_cache import Transfers
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.memory.swap import StreamSwapper, _runs
from tests.plain import shape

SHAPE = shape(2, 2, 2, 32, 8, 64)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ],
    ),
]


def tensors(device, *, num_blocks=40, num_swap_blocks=24, block_size=16):
    return CacheTensors(
        plan_layout(SHAPE, block_size, torch.float32, torch.float32),
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        dtype=torch.float32,
        device=torch.device(device),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_come_back_elsewhere_though_their_own_are_overwritten_at_once(device):
    draw = random.Random(0)
    cache = tensors(device)
    # Work that keeps a GPU's compute stream busy long after its launch.
    busy = torch.ones(2000, 2000, device=device) if device == "cuda" else None
    for number in range(100 if busy is not None else 12):
        leaving, arriving = draw.sample(range(40), 8), draw.sample(range(40), 8)
        places = draw.sample(range(24), 8)
        cache.device.copy_(torch.randn(cache.device.shape))
        expected = cache.device[leaving].clone()
        if busy is not None and number % 2:
            busy = busy @ busy / 2000
        out = list(zip(leaving, places, strict=True))
        back = list(zip(places, arriving, strict=True))
        draw.shuffle(back)
        if number % 3:
            cache.apply(Transfers(swap_out=out))
            cache.device.fill_(number)
            cache.apply(Transfers(swap_in=back))
        else:
            cache.apply(Transfers(swap_out=out, swap_in=back))
        assert torch.equal(cache.device[arriving], expected)


@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_timed_once(device):
    cache = tensors(device)
    cache.apply(Transfers(swap_out=[(0, 0), (1, 1)]))
    cache.apply(Transfers(swap_in=[(0, 2)]))
    if device == "cuda":
        torch.cuda.synchronize()
    times = cache.swapper.take_times()
    assert [blocks for blocks, _ in times] == [2, 1]
    assert all(0 < seconds < 60 for _, seconds in times)
    assert cache.swapper.take_times() == []


class LazyMoment:
    """A fake CUDA event, done when its stream reaches it."""

    def __init__(self):
        self.over = False

    def query(self):
        return self.over

    def elapsed_time(self, end):
        assert self.over
        assert end.over
        return 1.0


class LazyStream:
    """A fake CUDA stream: runs work only on demand, in order."""

    def __init__(self):
        self._given = deque()

    def run(self, work):
        self._given.append(work)

    def record(self):
        moment = LazyMoment()
        self._given.append(partial(setattr, moment, "over", True))
        return moment

    def wait(self, moment):
        self._given.append(moment)

    @property
    def ready(self):
        head = self._given[0] if self._given else None
        return head.over if isinstance(head, LazyMoment) else head is not None

    def advance(self):
        head = self._given.popleft()
        if not isinstance(head, LazyMoment):
            head()


@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_streams_are_late_with_the_copies_are_as_if_done_in_order(seed):
    draw = random.Random(seed)
    device, swap = torch.zeros(8, 2), torch.zeros(6, 2)
    in_order = device.clone(), swap.clone()
    compute, side = LazyStream(), LazyStream()
    swapper = StreamSwapper(
        device, swap, compute=compute, side=side, staging_bytes=2 * device[0].nbytes
    )
    reads = []

    def advance(count):
        for _ in range(count):
            if not (ready := [stream for stream in (compute, side) if stream.ready]):
                return
            draw.choice(ready).advance()

    def step(value):
        """The model writes one block and reads another."""
        written, read = draw.sample(range(8), 2)
        compute.run(partial(device[written].fill_, value))
        in_order[0][written] = value
        found = torch.empty(2)
        compute.run(partial(found.copy_, device[read]))
        reads.append((found, in_order[0][read].clone()))

    def swap_out(_):
        pairs = list(zip(*(draw.sample(range(n), 5) for n in (8, 6)), strict=True))
        swapper.swap_out(pairs)
        for block, place in pairs:
            in_order[1][place] = in_order[0][block]

    def swap_in(_):
        pairs = list(zip(*(draw.sample(range(n), 5) for n in (6, 8)), strict=True))
        swapper.swap_in(pairs)
        for place, block in pairs:
            in_order[0][block] = in_order[1][place]

    swaps = 0
    for value in range(1, 40):
        event = draw.choice((step, step, swap_out, swap_in))
        event(value)
        swaps += 0 if event is step else 5
        advance(draw.choice((0, 0, 3, 30)))
    timed = swapper.take_times()
    while compute.ready or side.ready:
        advance(1)
    assert torch.equal(device, in_order[0])
    assert torch.equal(swap, in_order[1])
    for found, expected in reads:
        assert torch.equal(found, expected)
    times = itertools.chain(timed, swapper.take_times())
    assert sum(blocks for blocks, _ in times) == swaps


def test_what_lies_in_a_row_goes_in_one_copy():
    assert list(_runs([])) == []
    assert list(_runs([4])) == [(range(1), 4)]
    assert list(_runs([1, 2, 3, 7, 9, 10])) == [(range(3), 1), (range(3, 4), 7), (range(4, 6), 9)]
