"""Prompts go to prefill engines, and go on at others, as long as both are there."""

import pytest

from octavo.router.admission.stages import MIN_PREFILL_TOKENS, for_stage, successors
from tests.router.admission.fixture import ManualAdmission, Replica, request

LONG = MIN_PREFILL_TOKENS


def prefill(**fields):
    return Replica(max_num_seqs=8, prefills=True, **fields)


def other(**fields):
    return Replica(max_num_seqs=8, **fields)


async def engine_of(replicas, **fields):
    """Return the engine that a request is sent to."""
    claim = await ManualAdmission(*replicas).admit(request(**fields))
    return claim.engine


async def test_a_prompt_goes_to_a_prefill_engine():
    for backwards in (False, True):
        replicas = [prefill(), other()]
        engine = await engine_of(replicas[::-1] if backwards else replicas, prompt_tokens=LONG)
        assert engine is replicas[0]


async def test_a_prompt_that_would_wait_goes_to_an_idle_engine():
    one, two, three = prefill(), other(), other()
    admission = ManualAdmission(one, two, three)
    admission.fill(two, 1)
    claims = [await admission.admit(request(prompt_tokens=LONG)) for _ in range(3)]
    assert [claim.engine for claim in claims] == [one, three, one]
    admission.release(claims[1])
    three.load.running = 1  # another router's
    assert (await admission.admit(request(prompt_tokens=LONG))).engine is one


@pytest.mark.parametrize("tokens", [1, LONG - 1])
async def test_a_short_prompt_does_not(tokens):
    two = other()
    assert await engine_of([prefill(), two], prompt_tokens=tokens) is two


async def test_a_cached_prompt_does_not():
    two = other(saved=LONG)
    assert await engine_of([prefill(), two], prompt_tokens=2 * LONG - 1) is two


async def test_a_beam_search_does_not():
    two, state = other(), request(prompt_tokens=LONG)
    state.request.message.beam.width = 2
    claim = await ManualAdmission(prefill(), two).admit(state)
    assert claim.engine is two


async def test_a_request_with_tokens_does_not():
    two, state = other(), request(prompt_tokens=LONG, migrated=True)
    state.output_tokens = 1
    claim = await ManualAdmission(prefill(), two).admit(state)
    assert claim.engine is two


@pytest.mark.parametrize("layouts", [("a", "b"), ("", "")])
def test_engines_that_cannot_copy_blocks_serve_whole_requests(layouts):
    one, two = prefill(block_layout=layouts[0]), other(block_layout=layouts[1])
    assert successors(one, [one, two]) == []
    assert for_stage([one, two], None) == [one, two]


def test_engines_of_one_role_serve_whole_requests():
    for replicas in ([prefill(), prefill()], [other(), other()]):
        assert for_stage(replicas, None) == replicas


async def test_it_goes_on_where_there_is_room_without_a_turn_in_the_queue():
    one, two = prefill(), Replica(max_num_seqs=1)
    admission = ManualAdmission(one, two)
    claim = await admission.admit(request(prompt_tokens=LONG))
    taken = admission.fill(two)
    assert admission.successor(claim) is None
    assert admission.hand_over(claim) is None
    for each in taken:
        admission.release(each)
    claim.state.handed_over = True
    admission.now = 5.0
    next_ = admission.hand_over(claim)
    assert (next_.engine, next_.migrated, next_.since) == (two, True, claim.since)
    admission.release(claim)
    admission.release(next_)
    assert one.sequences == two.sequences == 0


async def test_it_stays_while_no_engine_is_up():
    one = prefill()
    admission = ManualAdmission(one, other())
    claim = await admission.admit(request(prompt_tokens=LONG))
    admission.down = True
    assert admission.hand_over(claim) is None
