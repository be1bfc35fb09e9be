"""What clients are told of an engine that is slower than it could be."""

import pytest

from octavo.router.engines.pool import warnings
from octavo.v1 import engine_pb2


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (40, "started 40 s ago, about 120 s in all"),
        (300, "started 300 s ago, it takes longer than usual"),
    ],
)
def test_an_engine_that_compiles(seconds, said):
    info = engine_pb2.GetEngineInfoResponse(warnings=["no compiler"])
    load = engine_pb2.Load(compiling_seconds=seconds, compiling_estimate_seconds=120)
    first, second = warnings(info, load)
    assert first == "no compiler"
    assert second.startswith("the model is being compiled for this CPU")
    assert second.endswith(said)


def test_an_engine_that_does_not_compile():
    assert not list(warnings(engine_pb2.GetEngineInfoResponse(), engine_pb2.Load()))
