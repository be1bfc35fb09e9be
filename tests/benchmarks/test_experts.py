"""The benchmark of experts: its least times, and that all ways get the same rows."""

import pytest
import torch

from benchmarks import experts
from benchmarks.experts import CHOSEN, EXPERTS, HIDDEN, INNER, Machine, count_active

EXPERT_WEIGHTS = 3 * HIDDEN * INNER


def test_the_least_time_reads_each_active_expert_once_and_multiplies_each_row():
    machine = Machine(read=1e9, products={"bfloat16": 1e12, "int8": 2e12, "int4": 1e12})
    read, multiplied = machine.least("bfloat16", 1, CHOSEN)
    assert read == pytest.approx(CHOSEN * EXPERT_WEIGHTS * 2 / 1e9)
    assert multiplied == pytest.approx(CHOSEN * EXPERT_WEIGHTS * 2 / 1e12)
    assert machine.least("int8", 1, CHOSEN) == pytest.approx((read / 2, multiplied / 2))
    assert machine.least("int4", 1, CHOSEN)[0] == pytest.approx(read * 20 / 64)
    assert machine.least("grouped_mm", 1, CHOSEN) == (read, multiplied)
    assert machine.least("bfloat16", 8, CHOSEN) == pytest.approx((read, 8 * multiplied))


def test_active_experts_are_those_that_rows_chose():
    ids = torch.tensor([[3, 5], [5, EXPERTS - 1]])
    assert count_active((torch.empty(2, HIDDEN), ids, torch.ones(2, 2))) == 3


def test_the_rates_of_this_machine_are_plausible(monkeypatch):
    monkeypatch.setattr(experts, "MATRIX", 256)
    monkeypatch.setattr(experts, "READ_BYTES", 1 << 24)
    machine = Machine.measure(1)
    assert 1e8 < machine.read < 1e13
    assert 1e8 < machine.products["bfloat16"] <= machine.products["int8"]
