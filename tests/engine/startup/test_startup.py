"""Settings that cannot work are refused at startup, with a remedy."""

import pytest
import structlog.testing
import torch
from pydantic import ValidationError

from octavo.common import resources
from octavo.common.models.json_files import CONFIG, read_json
from octavo.common.models.rope_context import first_context
from octavo.common.resources import Memory
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.scheduling.scheduler import MAX_SCORED_TOKENS
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.engine.startup.cache_plan import largest_batch
from octavo.engine.startup.capacity import StartupError
from tests.architectures.entries import entries
from tests.architectures.serve import save
from tests.engine.stepper import parts_of
from tests.plain import shape

LAYOUT = plan_layout(shape(2, 2, 1, 32, 99, 8192), 16, torch.float32, torch.float32)


def settings(model, **given):
    return EngineSettings(**{"model": str(model), "num_blocks": 8, "swap_space": 0} | given)


def test_the_context_follows_from_the_blocks(tiny_model):
    parts = build(settings(tiny_model, num_blocks=8, block_size=16))
    assert parts.limits.max_model_len == 128
    parts = build(settings(tiny_model, num_blocks=64, block_size=16))
    assert parts.limits.max_model_len == 512


def test_the_blocks_follow_from_the_memory(tiny_model):
    parts = build(settings(tiny_model, num_blocks=None, cache_memory=0.25, dtype="float32"))
    block_bytes = 2 * 2 * 1 * 32 * 16 * 4  # layers, K and V, heads, head_dim, tokens, bytes
    assert parts.block_bytes == block_bytes
    assert parts.limits.budgets[0].total_blocks == (1 << 28) // block_bytes


@pytest.mark.parametrize(
    ("given", "seqs", "tokens"),
    [
        ({}, 128, 512),
        ({"max_num_seqs": 600}, 600, 600),
        ({"max_num_batched_tokens": 64}, 64, 64),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 24}, 8, 24),
    ],
)
def test_a_batch_is_as_large_as_what_is_said_allows(tiny_model, given, seqs, tokens):
    parts = build(settings(tiny_model, **given))
    assert (parts.max_num_seqs, parts.max_num_batched_tokens) == (seqs, tokens)
    assert parts.scheduler.max_num_seqs == seqs


def test_swap_space_may_be_none(tiny_model):
    assert build(settings(tiny_model)).scheduler.cache.swap.num_blocks == 0


def test_what_nobody_said_follows_from_a_containers_limits(tiny_model, monkeypatch):
    monkeypatch.setattr(resources, "memory", lambda: Memory(64 << 20, 40 << 20))
    monkeypatch.setattr(resources, "cpu_quota", lambda: 0.5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        parts = build(settings(tiny_model, num_blocks=None, swap_space=None))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert parts.limits.budgets[0].total_blocks == (10 << 20) // parts.block_bytes
    assert parts.scheduler.cache.swap.num_blocks == (10 << 20) // parts.block_bytes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"swap_space": 1e6}, r"--swap-space is 1e\+06 GiB, but this process may use [\d.]+ GiB"),
        (
            {"num_blocks": None, "cache_memory": 1e6},
            "--cache-memory is 1e.06 GiB, but this process may use",
        ),
        ({"num_blocks": None, "cache_memory": 1e-9}, "raise --cache-memory"),
        ({"max_model_len": 513}, "the model's context is 512 tokens"),
        ({"max_model_len": 200}, "the cache holds 128 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(tiny_model, given, message):
    with pytest.raises(StartupError, match=message):
        build(settings(tiny_model, **given))


def test_a_budget_below_the_batch_is_refused(tiny_model):
    with pytest.raises(ValidationError, match="every running sequence decodes a token per step"):
        settings(tiny_model, max_num_seqs=64, max_num_batched_tokens=32)


def test_the_largest_step_has_all_the_logits_that_a_step_may_have():
    batch = largest_batch(8192, 256, LAYOUT)
    assert batch.num_tokens == 8192
    assert sum(len(each.scored) for each in parts_of(batch)) == MAX_SCORED_TOKENS
    assert sum(len(each.sampled) for each in parts_of(batch)) == 256
    assert sorted(block for each in parts_of(batch) for block in each.tables[0]) == list(range(512))
    small = largest_batch(100, 8, LAYOUT)
    assert (small.num_tokens, len(parts_of(small)[0].scored)) == (100, 100)


@pytest.mark.parametrize("beyond", [False, True])
def test_a_stretched_context_is_said_once(tmp_path, beyond):
    save(next(e for e in entries() if e.name == "phi3, longrope"), tmp_path)
    first = first_context(read_json(tmp_path / CONFIG))
    with structlog.testing.capture_logs() as logs:
        build(settings(tmp_path, max_model_len=first + 8 if beyond else first, num_blocks=64))
    said = [entry for entry in logs if "rotary frequencies" in entry["event"]]
    assert [entry["original_context"] for entry in said] == [first] * beyond
