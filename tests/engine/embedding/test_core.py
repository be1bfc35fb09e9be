"""The loop that embeds: turns, budgets, cancellation, failures, its end."""

import gc
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch

from octavo.engine.core import EngineFailedError
from octavo.engine.embedding.core import Embedding, EmbeddingCore, RefusedError
from octavo.engine.metrics import EngineMetrics


class Lengths:
    """Embeds a text as its length; fails on texts of 99 tokens, and has NaN for 13."""

    dimensions = 2

    def __init__(self):
        self.steps = []

    def embed(self, texts):
        self.steps.append([len(text) for text in texts])
        if 99 in self.steps[-1]:
            raise RuntimeError("no")
        return torch.tensor([[len(text), torch.nan if len(text) == 13 else 0.5] for text in texts])

    def finish(self, embeddings, dimensions, *, raw):
        return embeddings[:, :dimensions]


def request(*lengths, dimensions=2):
    return Embedding([np.ones(length, np.uint32) for length in lengths], dimensions)


def core(encoder, **options):
    options = {"capacity": 64, "max_tokens": 20, "max_waiting": 3, "max_failed_steps": 2} | options
    loads = []
    made = EmbeddingCore(
        encoder, EngineMetrics(), lambda _outputs, _changes, load: loads.append(load), **options
    )
    return made, loads


def run(made, *requests):
    """Run the loop on requests until they have ended."""
    for each in requests:
        made.add(each)
        each.result.add_done_callback(lambda _: made.stop() if made.idle else None)
    made.run()


def values(each, dimensions=2):
    return np.frombuffer(each.result.result(0), "<f4").reshape(-1, dimensions).tolist()


def test_requests_take_turns_within_the_budget():
    encoder = Lengths()
    made, _ = core(encoder)
    long, short = request(9, 9, 9, 30), request(2, dimensions=1)
    run(made, long, short)
    assert encoder.steps == [[9, 2, 9], [9], [30]]
    assert values(long) == [[9, 0.5], [9, 0.5], [9, 0.5], [30, 0.5]]
    assert values(short, 1) == [[2]]


def test_a_cancelled_request_gets_no_more_steps():
    encoder = Lengths()
    made, _ = core(encoder)
    gone, other = request(9, 9, 9, 9), request(3)
    assert gone.result.cancel()
    run(made, other, gone)
    assert encoder.steps == [[3]]
    with pytest.raises(CancelledError):
        gone.result.result(0)
    assert made.idle


def test_a_failed_step_fails_its_requests_alone():
    encoder = Lengths()
    made, _ = core(encoder)
    bad, good = request(99), request(1)
    run(made, bad, good)
    with pytest.raises(RuntimeError, match="a step failed"):
        bad.result.result(0)
    assert values(good) == [[1, 0.5]]


def test_no_client_gets_nan():
    made, _ = core(Lengths())
    bad, good = request(2, 13), request(1)
    run(made, bad, good)
    with pytest.raises(ValueError, match="computes NaN or infinity"):
        bad.result.result(0)
    assert values(good) == [[1, 0.5]]


def test_the_loop_ends_after_too_many_failed_steps():
    made, _ = core(Lengths())
    last = [request(99), request(99), request(5)]
    with pytest.raises(EngineFailedError):
        run(made, *last)
    with pytest.raises(RefusedError):
        last[2].result.result(0)


def test_a_finished_request_needs_no_garbage_collector():
    made, _ = core(Lengths())
    only = request(3)
    gc.disable()
    try:
        run(made, only)
        found = weakref.ref(only)
        del only
        assert found() is None
    finally:
        gc.enable()


def test_a_full_queue_and_a_drain_refuse():
    made, loads = core(Lengths())
    for _ in range(3):
        made.add(request(1))
    with pytest.raises(RefusedError, match="3 requests wait"):
        made.add(request(1))
    made.drain()
    with pytest.raises(RefusedError, match="draining") as caught:
        made.add(request(1))
    assert caught.value.draining
    made.stop()
    made.run()
    assert loads[-1].draining
    assert loads[-1].total_blocks == 64
