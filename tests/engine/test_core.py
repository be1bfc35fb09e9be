"""The core loop in its thread: calls, deadlines, failures, and cleanup."""

import asyncio
import itertools
import threading
import time
from collections import defaultdict
from functools import partial

import pytest

from octavo.engine.core import EngineCore, EngineFailedError
from octavo.engine.core import step as core_step
from octavo.engine.events import FailureCode, OutputEvent
from octavo.engine.kv_transfer.grpc_peers import GrpcPeers
from octavo.engine.metrics import EngineMetrics
from octavo.engine.scheduling.request import FinishReason, Request
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.engine.server import _drain
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.v1.engine_pb2 import Failure, Started

PATIENCE = 30.0


def all_events(outputs):
    """Return the events of all sessions; tests give outputs no numbers, so there are no columns."""
    steps = outputs.values()
    return [e for step in steps for e in (*step.started, *step.outputs, *step.failures)]


class Listener:
    """Collects the core's events by request and lets a test wait for them."""

    def __init__(self):
        self.events = defaultdict(list)
        self.load = None
        self.opened = set()
        self._changed = threading.Condition()

    def __call__(self, outputs, changes, load):
        with self._changed:
            self.load = load
            self.opened |= {change.session for change in changes}
            for event in all_events(outputs):
                self.events[event.request_id].append(event)
            self._changed.notify_all()

    def wait(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), "nothing happened"

    def has(self, count):
        return sum(map(len, self.events.values())) > count

    def outputs(self, request_id):
        return [e for e in self.events[request_id] if isinstance(e, OutputEvent)]

    def ended(self, request_id):
        last = self.events[request_id][-1:]
        return any(isinstance(e, Failure) or getattr(e, "finish_reason", None) for e in last)


class Running:
    """A core that runs a tiny model."""

    def __init__(self, model, *, begin=True, async_scheduling=False, **settings):
        settings = {"model": str(model), "num_blocks": 64, "swap_space": 0.01} | settings
        self.settings = EngineSettings(**settings)
        self.parts = parts = build(self.settings)
        self.peers = GrpcPeers(parts.block_layout, parts.block_bytes, self.settings.peer_tls)
        self.async_scheduling = async_scheduling
        self.error = None
        self.sessions = itertools.count(1000)
        self.heard = Listener()
        self.metrics = EngineMetrics()
        self.core = EngineCore(
            self.parts.scheduler,
            self.parts.executor,
            self.metrics,
            self.heard,
            max_waiting=50,
            async_scheduling=async_scheduling,
            disk=self.parts.disk,
            peers=self.peers if parts.block_layout else None,
        )
        self.thread = threading.Thread(target=self.core.run, daemon=True)
        if begin:
            self.thread.start()

    def submit(self, request_id, tokens=40, max_tokens=20, *, session=0, **options):
        names = {"deadline", "kv_source", "cache_salt"} & options.keys()
        named = {name: options.pop(name) for name in names}
        request = Request(
            session,
            request_id,
            tuple(range(3, 3 + tokens)),
            SamplingParams(**{"temperature": 0.0} | options),
            max_tokens,
            time.monotonic(),
            **named,
        )
        self.core.submit(request)

    def run_until_it_fails(self):
        def run():
            try:
                self.core.run()
            except (EngineFailedError, RuntimeError) as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def wait_idle(self):
        self._wait_handled()
        self.heard.wait(lambda: self.core.idle)
        self._wait_handled()  # the last step's events are published before it
        cache = self.parts.scheduler.cache
        cache.check()
        cache.check_idle()

    def _wait_handled(self):
        """Wait until all calls made before are done."""
        session = next(self.sessions)
        self.core.open_session(session)
        self.heard.wait(lambda: session in self.heard.opened)

    def outcome(self, name):
        return self.metrics.registry.get_sample_value(
            "octavo_engine_requests_total", {"outcome": name}
        )


@pytest.fixture(params=[False, True], ids=["one by one", "async"])
def running(tiny_model, request):
    started = []

    def start(**settings):
        started.append(Running(tiny_model, async_scheduling=request.param, **settings))
        return started[-1]

    yield start
    for engine in started:
        engine.core.stop()
        engine.thread.join(PATIENCE)
        assert not engine.thread.is_alive()


def test_a_request_starts_gives_its_tokens_and_ends(running):
    engine = running()
    engine.submit("a", max_tokens=5)
    engine.heard.wait(lambda: engine.heard.ended("a"))
    first, *outputs = engine.heard.events["a"]
    assert isinstance(first, Started)
    assert [o.finish_reason for o in outputs] == [None] * 4 + [FinishReason.LENGTH]
    engine.wait_idle()
    assert engine.outcome("finished") == 1


def test_an_engine_that_nobody_asked_yet_shows_its_blocks(running):
    sample = running().metrics.registry.get_sample_value
    assert sample("octavo_engine_blocks", {"state": "free"}) == 64
    assert sample("octavo_engine_kv_cache_usage_ratio") == 0
    assert sample("octavo_engine_groups", {"state": "running"}) == 0


def test_idle_time_backs_the_cache_with_memory_and_a_request_cuts_it_short(running, monkeypatch):
    engine = running(begin=False)
    times = itertools.count()

    def populate():
        next(times)
        time.sleep(0.001)
        return True  # never done

    monkeypatch.setattr(engine.parts.executor.cache, "populate", populate)
    engine.thread.start()
    engine.heard.wait(lambda: next(times) > 100)
    engine.submit("a", max_tokens=5)
    engine.heard.wait(lambda: engine.heard.ended("a"))
    monkeypatch.undo()
    engine.wait_idle()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_aborts_at_every_moment_leave_nothing(running, mode):
    engine = running(
        num_blocks=12, preemption=mode, max_model_len=190, max_num_seqs=8, max_num_batched_tokens=16
    )
    for i in range(30):
        engine.submit(str(i), tokens=20 + i, max_tokens=60, n=1 + i % 3)
    for i in range(30):
        if i % 2:
            engine.heard.wait(partial(engine.heard.has, 8 * i))
        engine.core.abort(0, str(i))
    engine.wait_idle()
    assert engine.outcome("aborted") > 0


def call_in_step(engine, monkeypatch, number, call):
    """Call a function while the engine computes step `number`, counted from 1."""
    launch, steps = engine.parts.executor.launch, itertools.count(1)

    def launch_and_call(batch, inputs, *others):
        if next(steps) == number:
            call()
        return launch(batch, inputs, *others)

    monkeypatch.setattr(engine.parts.executor, "launch", launch_and_call)


def test_an_aborted_output_leaves_its_siblings(running, monkeypatch):
    engine = running()
    call_in_step(engine, monkeypatch, 10, lambda: engine.core.abort(0, "a", 1))
    engine.submit("a", tokens=10, max_tokens=30, n=3, temperature=1.0)
    engine.heard.wait(lambda: engine.heard.ended("a"))
    engine.wait_idle()
    outputs = engine.heard.outputs("a")
    assert {o.index for o in outputs if o.finish_reason} == {0, 2}
    counts = [sum(o.index == index for o in outputs) for index in range(3)]
    assert counts == [30, 9 if engine.async_scheduling else 10, 30]


def test_a_closed_session_takes_only_its_own_requests(running):
    engine = running()
    engine.submit("theirs", max_tokens=200, session=1)
    engine.submit("ours", max_tokens=30, session=2)
    engine.core.close_session(1)
    engine.wait_idle()
    assert not engine.heard.ended("theirs")
    assert engine.heard.ended("ours")


def test_a_deadline_fails_the_request(running):
    engine = running()
    engine.submit("late", max_tokens=400, deadline=time.monotonic() + 0.05)
    engine.heard.wait(lambda: engine.heard.ended("late"))
    assert engine.heard.events["late"][-1].code == FailureCode.DEADLINE_EXCEEDED
    engine.wait_idle()


def test_each_of_several_deadlines_counts(running, monkeypatch):
    engine = running(begin=False)
    core, now = engine.core, time.monotonic()
    for name, seconds in (("second", 30), ("none", None), ("ends before", 20), ("first", 10)):
        engine.submit(name, deadline=None if seconds is None else now + seconds)
    core._take_calls()
    core.requests.abort(0, "ends before", None)
    for later, left in (
        (9, ["second", "none", "first"]),
        (11, ["second", "none"]),
        (29, ["second", "none"]),
        (31, ["none"]),
        (99, ["none"]),
    ):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        core.requests.expire()
        assert [name for _, name in core.requests.groups] == left
    monkeypatch.undo()
    assert engine.outcome("deadline_exceeded") == 2
    engine.thread.start()


def test_a_failing_step_fails_what_ran_and_nothing_after(running, monkeypatch):
    engine = running()
    engine.submit("good", max_tokens=3)
    engine.wait_idle()
    good = [o.token_ids for o in engine.heard.outputs("good")]

    def fail(*_, **__):
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.parts.executor, "launch", fail)
    engine.submit("bad", max_tokens=3)
    engine.heard.wait(lambda: engine.heard.ended("bad"))
    assert engine.heard.events["bad"][-1].code == FailureCode.INTERNAL
    engine.submit("again", max_tokens=3)
    engine.wait_idle()
    assert [o.token_ids for o in engine.heard.outputs("again")] == good
    assert engine.heard.events["again"][0].cached_tokens == 0  # old contents are not trusted


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_step_that_fails_beside_another_leaves_nothing(running, monkeypatch, mode):
    engine = running(
        num_blocks=12, preemption=mode, max_model_len=190, max_num_seqs=8, max_num_batched_tokens=16
    )
    executor, scheduler = engine.parts.executor, engine.parts.scheduler
    launch = executor.launch

    def fail(batch, inputs, *others):
        preempted = [*scheduler.swapped, *(group for group in scheduler.waiting if group.history)]
        awaited = [group for group in preempted if any(s.num_placeholders for s in group.sequences)]
        if not (awaited if engine.async_scheduling else preempted):
            return launch(batch, inputs, *others)
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(executor, "launch", fail)
    for i in range(4):
        engine.submit(str(i), tokens=20 + i, max_tokens=60)
    engine.heard.wait(lambda: all(engine.heard.ended(str(i)) for i in range(4)))
    engine.wait_idle()
    assert engine.outcome("internal") > 0


def fail(*_, **__):
    raise RuntimeError("every step fails")


def test_too_many_failed_steps_in_a_row_end_the_core(running, monkeypatch):
    engine = running(begin=False)
    launch = engine.parts.executor.launch
    monkeypatch.setattr(engine.parts.executor, "launch", fail)
    engine.run_until_it_fails()
    for i in range(2):
        engine.submit(f"bad-{i}", max_tokens=3)
        engine.heard.wait(partial(engine.heard.ended, f"bad-{i}"))
    monkeypatch.setattr(engine.parts.executor, "launch", launch)
    engine.submit("good", max_tokens=3)
    engine.heard.wait(lambda: engine.heard.ended("good"))
    monkeypatch.setattr(engine.parts.executor, "launch", fail)
    for i in range(2, 5):
        assert engine.thread.is_alive()
        engine.submit(f"bad-{i}", max_tokens=3)
        engine.heard.wait(partial(engine.heard.ended, f"bad-{i}"))
    engine.thread.join(PATIENCE)
    assert isinstance(engine.error, EngineFailedError)
    assert str(engine.error) == "3 steps in a row failed"
    codes = {engine.heard.events[f"bad-{i}"][-1].code for i in range(5)}
    assert codes == {FailureCode.INTERNAL}


def test_a_lost_device_ends_the_core_at_once_and_nobody_waits(running, monkeypatch):
    engine = running(begin=False, max_num_seqs=1, max_num_batched_tokens=64)
    monkeypatch.setattr(engine.parts.executor, "launch", fail)
    monkeypatch.setattr(engine.parts.executor, "device_lost", lambda: True)
    engine.submit("first", max_tokens=3)
    engine.submit("second", max_tokens=3)
    engine.run_until_it_fails()
    engine.thread.join(PATIENCE)
    assert "device is lost" in str(engine.error)
    assert engine.heard.events["first"][-1].code == FailureCode.INTERNAL
    assert engine.heard.events["second"][-1].code == FailureCode.UNAVAILABLE
    engine.parts.scheduler.cache.check_idle()


def test_whatever_ends_the_core_nobody_waits(running, monkeypatch):
    engine = running(begin=False)
    monkeypatch.setattr(core_step, "advance", fail)
    engine.submit("a", max_tokens=3)
    engine.run_until_it_fails()
    engine.thread.join(PATIENCE)
    assert str(engine.error) == "every step fails"
    assert engine.heard.events["a"][-1].code == FailureCode.UNAVAILABLE


def test_a_running_id_and_a_full_queue_are_refused(running):
    engine = running(max_num_seqs=1, max_num_batched_tokens=16)
    engine.submit("a", max_tokens=400)
    engine.heard.wait(lambda: engine.heard.outputs("a"))
    engine.submit("a")
    engine.heard.wait(lambda: any(isinstance(e, Failure) for e in engine.heard.events["a"]))
    for i in range(51):
        engine.submit(f"queued-{i}", max_tokens=1)
    engine.heard.wait(lambda: engine.heard.ended("queued-50"))
    assert engine.heard.events["queued-50"][-1].code == FailureCode.RESOURCE_EXHAUSTED
    codes = {e.code for e in engine.heard.events["a"] if isinstance(e, Failure)}
    assert codes == {FailureCode.ALREADY_EXISTS}
    engine.wait_idle()


def test_draining_finishes_what_runs_and_refuses_the_rest(running):
    engine = running()
    engine.submit("a", max_tokens=50)
    engine.heard.wait(lambda: engine.heard.outputs("a"))
    engine.core.drain()
    engine.submit("b")
    engine.wait_idle()
    assert engine.heard.ended("a")
    assert engine.heard.events["b"][0].code == FailureCode.UNAVAILABLE
    assert engine.heard.load.draining


async def test_draining_waits_for_what_came_before_it(tiny_model):
    engine = Running(tiny_model, begin=False)
    engine.submit("a", max_tokens=20)  # still in the queue of calls when the drain begins
    drain = asyncio.create_task(_drain(engine.core, PATIENCE))
    await asyncio.sleep(0.1)
    engine.thread.start()
    await drain
    engine.core.stop()
    await asyncio.to_thread(engine.thread.join)
    assert engine.heard.outputs("a")[-1].finish_reason is FinishReason.LENGTH


def test_stopping_fails_what_is_left(running, monkeypatch):
    engine = running()
    call_in_step(engine, monkeypatch, 10, engine.core.stop)
    engine.submit("a", max_tokens=400)
    engine.thread.join(PATIENCE)
    assert engine.heard.events["a"][-1].code == FailureCode.UNAVAILABLE
    engine.parts.scheduler.cache.check_idle()
