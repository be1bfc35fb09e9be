"""What ranks say when one of them cannot serve the model."""

import time

import pytest

from octavo.engine.parallel.place import RankPlace
from octavo.engine.parallel.world import World
from tests.engine.parallel.harness import save_models, start_ranks

WHY = "cannot be served: there is no kernel"


@pytest.mark.few(1)
@pytest.mark.parametrize(("stages", "refused"), [(2, 1), (2, 0), (1, 1)])
def test_all_ranks_say_why_one_of_them_left(stages, refused, tmp_path):
    (model,) = save_models(["qwen3"], tmp_path)
    case = {"model": model, "settings": {}, "stages": stages, "refused": [refused]}
    codes, printed = start_ranks(2, {"refused": case}, tmp_path)
    assert codes == [1, 1]
    assert printed[refused] == f"{model} {WHY}"
    assert printed[1 - refused] == f"rank {refused} failed: {model} {WHY}"


class CutOffStore:
    """A store on a machine that no packet reaches."""

    def check(self, _):
        time.sleep(60)


def test_a_rank_that_is_cut_off_from_the_store_does_not_wait_for_its_answer():
    world = World(RankPlace(1, 2, 0, 1), 1, None, None, None, CutOffStore())
    began = time.monotonic()
    assert world.failure() is None
    assert time.monotonic() - began < 20
