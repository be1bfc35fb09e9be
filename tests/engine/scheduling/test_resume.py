"""Outputs that another engine began continue as if they had never moved."""

import threading

import pytest

from octavo.common.rpc import RpcError
from octavo.engine.core import EngineCore
from octavo.engine.events import OutputEvent
from octavo.engine.metrics import EngineMetrics
from octavo.engine.rpc.validation import to_request
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.v1 import engine_pb2

PATIENCE = 30.0
EOS = 7
LENGTH = 30


class Engine:
    """A core that takes Submits and returns the resulting groups."""

    def __init__(self, model):
        settings = EngineSettings(
            model=str(model), dtype="float32", num_blocks=64, swap_space=0, max_num_seqs=8
        )
        self.parts = build(settings)
        self.limits = self.parts.limits
        self.events = []
        self.changed = threading.Condition()
        self.core = EngineCore(
            self.parts.scheduler, self.parts.executor, EngineMetrics(), self.hear, max_waiting=50
        )
        self.thread = threading.Thread(target=self.core.run, daemon=True)
        self.thread.start()

    def hear(self, outputs, _changes, _load):
        with self.changed:
            for step in outputs.values():
                self.events += (*step.started, *step.outputs, *step.failures)
            self.changed.notify_all()

    def generate(self, request_id, **fields):
        """Run a request to its end; return its outputs' events by index."""
        submit = engine_pb2.Submit(request_id=request_id, prompt_token_ids=range(10, 33), **fields)
        request = to_request(submit, session=0, limits=self.limits, eos_token_ids=[EOS])
        unfinished = set(range(request.num_outputs))
        unfinished -= {i for i, resumed in request.resume.items() if resumed.finished}
        self.core.submit(request)
        with self.changed:
            assert self.changed.wait_for(lambda: self._ended(request_id, unfinished), PATIENCE)
        outputs = {i: [] for i in range(request.num_outputs)}
        for event in self.events:
            if event.request_id == request_id and isinstance(event, OutputEvent):
                outputs[event.index].append(event)
        return outputs

    def _ended(self, request_id, unfinished):
        mine = [e for e in self.events if e.request_id == request_id]
        assert not any(isinstance(e, engine_pb2.Failure) for e in mine), mine
        return {e.index for e in mine if getattr(e, "finish_reason", None)} == unfinished


@pytest.fixture(scope="module")
def engine(tiny_model):
    started = Engine(tiny_model)
    yield started
    started.core.stop()
    started.thread.join(PATIENCE)
    started.parts.scheduler.cache.check_idle()


def tokens(events):
    return [token for event in events for token in event.token_ids]


SAMPLING = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 5, "temperature": 1.5},
    "truncated": {"seed": 2**63 + 1, "top_p": 0.8, "top_k": 50, "n": 3},
    "penalised": {
        "seed": 9,
        "n": 3,
        "temperature": 0.3,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.3,
    },
    "greedy, penalised": {"temperature": 0, "frequency_penalty": 2.0, "presence_penalty": 1.0},
}


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("cuts", [(1, 0, 2), (16, 3, 29), (29, 8, 9)])
def test_a_resumed_output_is_the_undisturbed_one(engine, name, cuts):
    fields = {
        "sampling": SAMPLING[name],
        "stop": {"max_tokens": LENGTH, "min_tokens": 20},
        "output": {"logprobs": 2},
    }
    whole = engine.generate(f"{name} {cuts} whole", **fields)
    resume = [
        {"index": i, "token_ids": tokens(events)[:cut]}
        for (i, events), cut in zip(whole.items(), cuts, strict=False)
        if cut < len(events)
    ]
    rest = engine.generate(f"{name} {cuts} rest", **fields, resume=resume)
    for entry in resume:
        i, cut = entry["index"], len(entry["token_ids"])
        assert tokens(rest[i]) == tokens(whole[i])[cut:]
        assert rest[i][-1].finish_reason == whole[i][-1].finish_reason
        for again, event in zip(rest[i], whole[i][cut:], strict=True):
            assert again.logprob.token_id == event.logprob.token_id
            assert again.logprob.logprob == pytest.approx(event.logprob.logprob, abs=1e-4)


def test_a_finished_output_is_not_made_again(engine):
    fields = {"sampling": {"n": 3, "seed": 1}, "stop": {"max_tokens": 12, "ignore_eos": True}}
    whole = engine.generate("all three", **fields)
    resume = [{"index": 0, "finished": True}, {"index": 2, "token_ids": tokens(whole[2])[:5]}]
    rest = engine.generate("two of them", **fields, resume=resume)
    assert rest[0] == []
    assert tokens(rest[1]) == tokens(whole[1])
    assert tokens(rest[2]) == tokens(whole[2])[5:]


def test_prompt_logprobs_can_still_come_with_the_first_token(engine):
    fields = {
        "sampling": {"n": 2, "seed": 1},
        "stop": {"max_tokens": 12, "ignore_eos": True},
        "output": {"prompt_logprobs": 0},
    }
    whole = engine.generate("prompt scored", **fields)
    resume = [{"index": 1, "token_ids": tokens(whole[1])[:5]}]
    rest = engine.generate("prompt scored later", **fields, resume=resume)
    assert tokens(rest[0]) == tokens(whole[0])
    assert tokens(rest[1]) == tokens(whole[1])[5:]
    assert len(rest[0][0].prompt_logprobs) == 22


@pytest.mark.parametrize(
    ("resume", "field"),
    [
        ([{"index": 2}], r"resume\[0\].index"),
        ([{"index": 1}, {"index": 1}], r"resume\[1\].index"),
        ([{"token_ids": [5000]}], r"resume\[0\].token_ids\[0\]"),
        ([{"token_ids": [1] * 8}], r"resume\[0\].token_ids"),
        ([{"finished": True}, {"index": 1, "finished": True}], "resume"),
    ],
)
def test_what_no_router_would_resume_is_refused(engine, resume, field):
    with pytest.raises(RpcError) as refused:
        engine.generate("bad", sampling={"n": 2}, stop={"max_tokens": 8}, resume=resume)
    assert refused.match(field)


def test_a_search_begins_anew(engine):
    with pytest.raises(RpcError, match="resume must be empty"):
        engine.generate("beams", beam={"width": 2}, resume=[{"index": 0, "token_ids": [5]}])
