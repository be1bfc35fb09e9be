"""The steps of several ranks compiled as on GPUs, with their sums as operators."""

import pytest

from tests.engine.parallel.harness import run_ranks, save_models, start_ranks

SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 48}


@pytest.mark.slow
@pytest.mark.parametrize("uncompilable", [[], [1]])
def test_ranks_compile_and_give_the_tokens_of_one(uncompilable, tmp_path):
    (model,) = save_models(["few key and value heads"], tmp_path)
    case = {"model": model, "work": "masked", "settings": SMALL}
    alone = run_ranks(1, {"it": case}, tmp_path)["it"]
    given = {"it": case | {"uncompilable": uncompilable, "recorded": {}}}
    codes, printed = start_ranks(2, given, tmp_path)
    assert codes == [0, 0], printed
    leader, follower = (each["it"] for each in printed)
    assert leader["tokens"] == alone["tokens"]
    assert leader["compiled"] == (not uncompilable)
    assert leader["sums"] == follower["sums"]
    assert {len(each) for each in leader["sums"]} == {5}
