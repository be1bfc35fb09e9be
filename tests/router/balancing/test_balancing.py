from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from pydantic import ValidationError

from octavo.common.kv_cache.prefix_hash import reusable_keys, short_key
from octavo.router.balancing import POLICIES, RoundRobin, least_loaded, prefix_aware
from octavo.router.balancing.policy import has_room, headroom
from octavo.router.balancing.prefix_aware import SEQUENCE_TOKENS
from octavo.router.balancing.prefixes import MAX_EXPECTED, Prefixes
from octavo.router.settings import RouterSettings
from octavo.v1 import engine_pb2

BLOCK = 16


@dataclass(eq=False)
class Replica:
    max_num_seqs: int = 8
    sequences: int = 0
    load: engine_pb2.Load = field(default_factory=engine_pb2.Load)
    prefixes: Prefixes = field(default_factory=Prefixes)

    def saved_tokens(self, request):
        return self.prefixes.worth(request.keys(BLOCK), self.load.disk_read_share) * BLOCK

    def expect(self, request):
        self.prefixes.expect(request.keys(BLOCK))


@dataclass(frozen=True)
class RequestNeeds:
    sequences: int = 1
    model: str = "m"
    prompt: Sequence[int] = ()
    salt: str = ""

    def keys(self, block_size):
        return [short_key(key) for key in reusable_keys(self.prompt, block_size, self.salt)]


def choose(policy, *replicas, **fields):
    chosen = policy(replicas, RequestNeeds(**fields))
    if chosen is not None:
        chosen.sequences += 1
    return chosen


def test_least_loaded_by_sequences_then_blocks():
    a, b = Replica(sequences=2), Replica(sequences=1)
    assert choose(least_loaded, a, b) is b
    a, b = Replica(), Replica()
    a.load = engine_pb2.Load(total_blocks=10, free_blocks=2)
    b.load = engine_pb2.Load(total_blocks=10, free_blocks=1, cached_blocks=5)
    assert choose(least_loaded, a, b) is b


def test_what_other_routers_gave_counts():
    a, b = Replica(), Replica(sequences=1)
    a.load = engine_pb2.Load(running=3, waiting=1)
    assert choose(least_loaded, a, b) is b


def test_bigger_engines_take_more():
    a, b = Replica(4, sequences=2), Replica(16, sequences=4)
    assert choose(least_loaded, a, b) is b


def test_room_has_headroom_and_an_idle_engine_takes_anything():
    assert has_room(Replica(8), 100)
    busy = Replica(8, sequences=8)
    assert has_room(busy, headroom(8))
    assert not has_room(busy, headroom(8) + 1)


def test_what_other_routers_gave_takes_room():
    others = Replica(8, sequences=1, load=engine_pb2.Load(running=8, waiting=1))
    assert not has_room(others, 1)
    others.sequences = 0
    assert has_room(others, 1), "or this router's requests would wait for those of others"


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_fills_a_full_engine(policy):
    policy = POLICIES[policy]()
    full, free = Replica(8, sequences=9), Replica(8, sequences=7)
    prompt = range(100)
    full.expect(RequestNeeds(prompt=prompt))
    assert choose(policy, full, free, prompt=prompt) is free
    assert choose(policy, full, sequences=8) is None
    assert choose(policy) is None


def test_round_robin_takes_turns_in_each_model():
    policy = RoundRobin()
    a, b, c = Replica(), Replica(), Replica()
    d, e = Replica(), Replica()
    turns = []
    for _ in range(4):
        turns.append(choose(policy, a, b, c, model="m"))
        turns.append(choose(policy, d, e, model="n"))
    assert turns == [a, d, b, e, c, d, a, e]


def test_a_prefix_stays_with_its_engine():
    policy = prefix_aware
    a, b = Replica(128), Replica(128)
    prompts = [[i] * 200 + list(range(50)) for i in range(6)]
    first = [choose(policy, a, b, prompt=prompt) for prompt in prompts]
    assert first.count(a) == first.count(b) == 3
    again = [[i] * 200 + list(range(50, 100)) for i in range(6)]
    assert [choose(policy, a, b, prompt=prompt) for prompt in again] == first


def test_a_hot_prefix_spreads_when_that_costs_less_than_waiting():
    policy = prefix_aware
    a, b = Replica(128), Replica(128)
    prefix = [7] * 320
    given = [choose(policy, a, b, prompt=[*prefix, i]) for i in range(100)]
    ahead = given.index(b if given[0] is a else a)
    assert ahead == pytest.approx(320 / SEQUENCE_TOKENS, abs=1)
    assert abs(given.count(a) - given.count(b)) <= ahead


def test_what_engines_report_is_believed():
    a, b = Replica(), Replica()
    request = RequestNeeds(prompt=range(100), salt="salt")
    keys = [short_key(key) for key in reusable_keys(range(100), BLOCK, "salt")]
    b.prefixes.apply(engine_pb2.PrefixChanges(stored=keys[:4]))
    assert b.saved_tokens(request) == 4 * BLOCK
    assert b.saved_tokens(RequestNeeds(prompt=range(100))) == 0
    assert choose(prefix_aware, a, b, prompt=request.prompt, salt="salt") is b
    assert b.saved_tokens(request) == 6 * BLOCK  # it will soon have the rest
    b.prefixes.apply(engine_pb2.PrefixChanges(stored=keys[4:], evicted=keys[1:2]))
    assert b.saved_tokens(request) == BLOCK


def test_expectations_that_do_not_come_true_are_bounded():
    prefixes = Prefixes()
    prefixes.expect(range(MAX_EXPECTED + 10))
    assert prefixes.match([10]) == 1
    assert prefixes.match([9]) == 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_registered_policy_is_a_choice(name):
    assert RouterSettings(balancing=name).balancing == name
    assert POLICIES[name]()([], RequestNeeds()) is None


def test_unregistered_policies_are_refused():
    with pytest.raises(ValidationError, match="'prefix_aware', 'least_loaded'"):
        RouterSettings(balancing="by hand")


def test_a_prefix_on_disk_is_worth_what_reading_it_saves():
    request = RequestNeeds(prompt=range(100))
    keys = request.keys(BLOCK)
    a, b = Replica(load=engine_pb2.Load(disk_read_share=0.25)), Replica()
    a.prefixes.apply(engine_pb2.PrefixChanges(stored=keys[:1], disk_stored=keys[:5]))
    assert a.saved_tokens(request) == (1 + 4 * 0.75) * BLOCK
    b.prefixes.apply(engine_pb2.PrefixChanges(stored=keys[:3]))
    assert choose(prefix_aware, b, a, prompt=range(100)) is a
    b.prefixes.apply(engine_pb2.PrefixChanges(disk_stored=keys, disk_removed=keys[4:]))
    assert b.saved_tokens(request) == 4 * BLOCK
    c = Replica(load=engine_pb2.Load(disk_read_share=1))
    c.prefixes.apply(engine_pb2.PrefixChanges(disk_stored=keys))
    assert c.saved_tokens(request) == 0
