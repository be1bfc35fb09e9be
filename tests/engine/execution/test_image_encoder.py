"""An image is encoded over several steps, in which other requests get their tokens."""

import threading
import time

import pytest

from octavo.engine.execution import image_encoder
from octavo.engine.scheduling.sequence import GroupState
from tests.engine.models.test_vision import Asked, ask, begin, check, engine_of

STEPS = 12
"""Minimum steps that an image of the tiny model takes if each computes one layer."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Return prompts of SmolVLM, whose images have several tiles: 1 has one image, 2 has two."""
    return Asked("smolvlm", tmp_path_factory.mktemp("smolvlm"), 6)


@pytest.fixture
def engine(asked, monkeypatch):
    """Return an engine that computes one layer of the vision encoder in each step."""
    monkeypatch.setattr(image_encoder, "SECONDS", 0)
    return engine_of(asked, num_blocks=128, max_num_seqs=8)


def encoding():
    """Return whether an image is being encoded."""
    return any(thread.name == "image encoder" for thread in threading.enumerate())


def begun(engine, asked, number, **options):
    """Submit a prompt with an image, and compute steps until its encoding has begun."""
    (group,) = begin(engine, asked, [number], **options).values()
    for _ in range(4):
        engine.step()
    assert encoding()
    assert group.sequences[0].num_computed == 0
    return group


def test_others_get_a_token_in_every_step(engine, asked):
    text = engine.submit(range(10, 30), max_tokens=200)
    engine.step()
    group, tokens = begun(engine, asked, 1), text.sequences[0].num_output
    steps = 0
    while encoding():
        engine.step()
        steps += 1
    assert steps > STEPS
    assert text.sequences[0].num_output == tokens + steps
    engine.run()
    check(asked, {1: group})


def test_an_image_alone_takes_one_step(asked):
    engine = engine_of(asked, num_blocks=128)
    (group,) = begin(engine, asked, [1]).values()
    engine.step()
    assert not encoding()
    engine.step()
    assert group.sequences[0].num_output == 1, "its prompt waited for something else"


def test_a_second_request_waits_for_the_same_image(engine, asked, monkeypatch):
    calls, encode = [], engine.parts.vision.encode
    monkeypatch.setattr(
        engine.parts.vision, "encode", lambda *given: calls.append(1) or encode(*given)
    )
    first = begun(engine, asked, 1)
    second = begun(engine, asked, 1)
    engine.run()
    assert len(calls) == 1
    check(asked, {1: first})
    check(asked, {1: second})


def test_a_cancelled_request_ends_the_encoding_unless_another_needs_it(engine, asked):
    first, second = begun(engine, asked, 1), begun(engine, asked, 1)
    engine.core.requests.abort(0, first.request.request_id, None)
    engine.step()
    assert encoding()
    engine.core.requests.abort(0, second.request.request_id, None)
    assert engine.core.working
    engine.run()
    assert not encoding()
    assert not engine.parts.executor._encoder.embeddings
    check(asked, ask(engine, asked, [1, 2]))


def test_a_deadline_ends_the_encoding(engine, asked):
    group = begun(engine, asked, 2, deadline=time.monotonic() + 0.05)
    time.sleep(0.06)
    engine.core.requests.expire()
    engine.run()
    assert group.state is GroupState.FINISHED
    assert not encoding()
    assert not group.sequences[0].num_output


def test_a_layer_that_fails_on_a_tile_fails_its_requests_alone(engine, asked, monkeypatch):
    layer = engine.parts.vision._parts.vision_model.encoder.layers[1].mlp
    forward, calls = layer.forward, []

    def fail_on_third(hidden):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(hidden)

    monkeypatch.setattr(layer, "forward", fail_on_third)
    text = engine.submit(range(10, 30), max_tokens=100)
    bad, good = begun(engine, asked, 1), begin(engine, asked, [2])
    engine.run()
    assert bad.state is GroupState.FINISHED
    assert not bad.sequences[0].num_output
    assert text.sequences[0].num_output == 100
    check(asked, good)
    check(asked, ask(engine, asked, [1]))


def test_a_step_that_fails_begins_the_image_again(engine, asked):
    group = begun(engine, asked, 1)
    engine.scheduler.images.forget()
    engine.run()
    check(asked, {1: group})
    assert not encoding()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_prompt_is_preempted_while_its_image_is_encoded(asked, monkeypatch, preemption):
    monkeypatch.setattr(image_encoder, "SECONDS", 0)
    engine = engine_of(asked, num_blocks=18, preemption=preemption, enable_prefix_caching=False)
    answers = begin(engine, asked, [2])  # the second of its images is computed later
    texts = [engine.submit(range(10, 60), max_tokens=100, priority=1) for _ in range(2)]
    engine.run()
    check(asked, answers)
    assert all(text.sequences[0].num_output == 100 for text in texts)
    assert engine.scheduler.counters[f"preemptions_{preemption}"]
