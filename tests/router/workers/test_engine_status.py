"""An engine's status merged over all workers."""

from octavo.router.workers.engine_status import merged_lists, merged_stats
from octavo.v1 import admin_pb2, engine_pb2

UP = {"state": admin_pb2.ENGINE_STATE_SERVING, "model": "m", "load": engine_pb2.Load(running=3)}


def test_an_engine_is_connected_when_every_worker_has_it():
    connecting = {"state": admin_pb2.ENGINE_STATE_CONNECTING, "problem": "no tokenizer"}
    first = [admin_pb2.EngineStatus(address="b:1", sequences=2, **UP)]
    second = [
        admin_pb2.EngineStatus(address="a:1", sequences=1, **UP),
        admin_pb2.EngineStatus(address="b:1", **connecting),
    ]
    a, b = merged_lists([first, second])
    assert (a.address, a.state, a.sequences) == ("a:1", admin_pb2.ENGINE_STATE_SERVING, 1)
    assert (b.state, b.sequences) == (admin_pb2.ENGINE_STATE_CONNECTING, 2)
    assert (b.model, b.load.running, b.problem) == ("m", 3, "no tokenizer")


def test_stats_are_summed_and_loads_are_not():
    def stats(requests, *sequences):
        engines = [
            {
                "address": str(n),
                "instance": f"i{n}",
                "models": ["m"],
                "sequences": count,
                "load": {"running": 9},
            }
            for n, count in enumerate(sequences)
        ]
        return {"requests": requests, "output_tokens": 10 * requests, "engines": engines}

    found = merged_stats([stats(1, 2, 3), stats(4, 5)])
    assert (found["requests"], found["output_tokens"]) == (5, 50)
    assert [engine["sequences"] for engine in found["engines"]] == [7, 3]
    assert [engine["load"]["running"] for engine in found["engines"]] == [9, 9]
