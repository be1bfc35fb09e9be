"""Steps of several ranks that are recorded, with their sums, and scheduled ahead as on GPUs."""

import pytest

from tests.engine.lora.conftest import CONFIGS
from tests.engine.parallel.harness import run_ranks, save_models, start_ranks
from tests.engine.parallel.test_adapters import save_adapters

SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 48}
NGRAM = SMALL | {"speculation": "ngram", "num_speculative_tokens": 3}
SUMS = 5
"""Sums of a step: the embedding's, and two a layer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    (path,) = save_models(["few key and value heads"], tmp_path_factory.mktemp("models"))
    return path


def case(model, work, settings=SMALL, **more):
    return {"model": model, "work": work, "settings": settings, "recorded": {}} | more


def assert_together(cases, folder):
    """Assert that two ranks replay the same graphs and give the tokens of one rank."""
    alone = run_ranks(1, cases, folder)
    codes, printed = start_ranks(2, cases, folder)
    assert codes == [0, 0], printed
    leader, follower = printed
    for name, one in alone.items():
        assert leader[name]["tokens"] == one["tokens"], name
        sums, order = leader[name]["sums"], leader[name]["order"]
        assert (sums, order) == (follower[name]["sums"], follower[name]["order"]), name
        assert {len(each) for each in sums} == {SUMS}, name
        assert len(set(order)) > 2, name
    return leader


def test_ranks_replay_the_same_graphs_and_give_the_tokens_of_one(model, tmp_path):
    cases = {"drafts": case(model, "again repetitive", NGRAM, ahead=True)}
    assert assert_together(cases, tmp_path)["drafts"]["accepted"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_so_do_beams_and_swapped_requests(model, tmp_path, ahead):
    swap = SMALL | {"num_blocks": 20, "preemption": "swap"}
    cases = {
        "mixed": case(model, "mixed", ahead=ahead),
        "swap": case(model, "mixed again", swap, ahead=ahead),
    }
    assert assert_together(cases, tmp_path)["swap"]["swapped"] > 0


@pytest.mark.slow
def test_so_do_steps_with_adapters(model, tmp_path):
    lora = {"lora": save_adapters(model, tmp_path, CONFIGS)}
    unchecked = {"unchecked": True}
    cases = {"it": case(model, "adapted", SMALL | lora, ahead=True, recorded=unchecked)}
    alone = run_ranks(1, cases, tmp_path)
    codes, printed = start_ranks(2, cases, tmp_path)
    assert codes == [0, 0], printed
    leader, follower = (each["it"] for each in printed)
    assert leader["tokens"] == alone["it"]["tokens"]
    assert leader["replayed"] == follower["replayed"]
    assert len(leader["replayed"]) > 20


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_record_no_rank_replays(model, tmp_path, rank):
    cases = {"it": case(model, "masked", recorded={"fails": {rank: 2}})}
    alone = run_ranks(1, cases, tmp_path)
    codes, printed = start_ranks(2, cases, tmp_path)
    assert codes == [0, 0], printed
    assert printed[0]["it"]["tokens"] == alone["it"]["tokens"]
    assert [each["it"]["order"] for each in printed] == [[], []]


@pytest.mark.slow
def test_another_graph_than_rank_0_replays_is_found(model, tmp_path):
    cases = {"it": case(model, "masked", recorded={"wrong": 1})}
    codes, printed = start_ranks(2, cases, tmp_path)
    assert all(codes)
    assert printed[1].startswith("this rank has ('replayed', ")
