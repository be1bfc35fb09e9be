"""An engine that constrains the outputs of a tiny random model of bytes."""

import pytest

from benchmarks.fixture import make_model
from tests.engine.constraints.runner import Runner


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory) -> str:
    """A two-layer random model whose tokens are bytes."""
    return make_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def engine(byte_model):
    """An engine with enough memory, which a module's tests share."""
    runner = Runner(byte_model)
    yield runner
    runner.close()


@pytest.fixture
def crowded(byte_model):
    """Creates engines with so few blocks that they preempt."""
    runners = []

    def make(**settings) -> Runner:
        few = {"num_blocks": 64, "max_model_len": 512, "max_num_seqs": 16}
        runners.append(Runner(byte_model, **(few | settings)))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()
