"""What ranks say when one of them cannot serve the model."""

import pytest

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
