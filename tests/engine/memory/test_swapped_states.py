"""Swapping a hybrid model's states out and in changes neither the states nor the outputs."""

import random

import pytest
import torch

from octavo.engine.scheduling.swap_or_recompute import PreemptionPolicy
from tests.architectures.entries import entries
from tests.architectures.serve import save, start
from tests.architectures.tiny import FIRST_TOKEN, VOCABULARY

BY_NAME = {entry.name: entry for entry in entries()}
LENGTHS, OUTPUT_TOKENS = (60, 33, 5, 48, 17, 9), 50
CROWDING = 1.4
"""Blocks per block of the longest request; not all requests fit at once."""


class StateWatch:
    """Reads states before their blocks are swapped out, and after they are swapped in.

    Attributes:
        returned: Number of states that returned unchanged.
    """

    def __init__(self, engine):
        self._tables = engine.cache._tables
        self._groups = [i for i, group in enumerate(engine.cache.groups) if group.state_blocks]
        self._blocks = engine.parts.executor.cache.device
        self._copy = engine.parts.executor.cache.apply
        self._left = {}
        self.returned = 0
        engine.parts.executor.cache.apply = self._apply

    def _apply(self, transfers):
        swapped = {id_ for id_, table in self._tables.items() if table.swapped}
        device = {kept: block for block, kept in transfers.swap_out}
        for id_ in swapped - self._left.keys():
            blocks = [device[kept] for kept in self._state_blocks(id_)]
            self._left[id_] = self._bytes(blocks)
            assert self._left[id_].any()
        back = [id_ for id_ in self._left if id_ in self._tables and id_ not in swapped]
        for id_ in back:
            there = self._bytes(self._state_blocks(id_))
            assert not torch.equal(there, self._left[id_]), "they were never overwritten"
        self._copy(transfers)
        for id_ in back:
            assert torch.equal(self._bytes(self._state_blocks(id_)), self._left.pop(id_))
            self.returned += 1

    def _state_blocks(self, id_):
        return [block for group in self._groups for block in self._tables[id_].groups[group]]

    def _bytes(self, blocks):
        return self._blocks[blocks].view(torch.uint8)


def outputs_of(engine):
    draw = random.Random(0)
    prompts = [draw.choices(range(FIRST_TOKEN, VOCABULARY), k=length) for length in LENGTHS]
    groups = [engine.submit(prompt, OUTPUT_TOKENS) for prompt in prompts]
    engine.run()
    return [group.sequences[0].token_ids for group in groups]


@pytest.mark.parametrize("name", ["falcon_h1", "granitemoehybrid"])
def test_states_come_back_byte_for_byte(name, tmp_path):
    save(BY_NAME[name], tmp_path)
    ample = start(tmp_path)
    (budget,) = ample.parts.limits.budgets
    least = budget.needed(max(LENGTHS), OUTPUT_TOKENS, 1)
    crowded = start(tmp_path, num_blocks=int(CROWDING * least))
    crowded.scheduler.policy = PreemptionPolicy("swap")
    watch = StateWatch(crowded)
    assert outputs_of(crowded) == outputs_of(ample)
    assert watch.returned >= 2
    assert watch.returned == crowded.scheduler.counters["preemptions_swap"]
    assert ample.scheduler.counters["preemptions_swap"] == 0
