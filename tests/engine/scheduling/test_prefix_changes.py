"""The prefix changes reported to routers match the prefix cache."""

import random

from octavo.common.kv_cache.layer_groups import LayerGroup
from octavo.common.kv_cache.prefix_hash import block_key, reusable_keys, root_key, short_key
from octavo.engine.events import PrefixChange
from octavo.engine.kv_cache import KVCacheManager, OutOfBlocksError
from octavo.engine.rpc.session import Session
from octavo.v1 import engine_pb2


def held(cache):
    return set(cache.device._block_of) | set(cache.swap._block_of)


def test_changes_add_up_to_what_is_held():
    cache = KVCacheManager(
        num_blocks=12,
        groups=[LayerGroup(4)],
        num_swap_blocks=6,
        prefix_caching=True,
        step_tokens=99,
    )
    draw = random.Random(3)
    prompts = [[draw.randrange(9) for _ in range(draw.randrange(9, 30))] for _ in range(6)]
    known, gone = set(), 0
    for number in range(400):
        tokens = draw.choice(prompts)
        try:
            cache.admit(number, tokens)
        except OutOfBlocksError:
            continue
        cache.publish(number, tokens, len(tokens))
        cache.free(number)
        cache.take_transfers()
        if draw.random() < 0.01:
            cache.forget_contents()
        if draw.random() < 0.5:
            stored, evicted = cache.prefixes.take_changes()
            assert not known & stored
            assert evicted <= known
            known = (known | stored) - evicted
            gone += len(evicted)
            assert known == held(cache) == cache.prefixes.published
    assert gone > 100


def test_reusable_keys_are_those_of_the_cache():
    cache = KVCacheManager(
        num_blocks=12,
        groups=[LayerGroup(4)],
        num_swap_blocks=0,
        prefix_caching=True,
        step_tokens=99,
    )
    tokens = list(range(17))
    cache.admit(0, tokens, salt="s")
    cache.publish(0, tokens, 17)
    assert list(reusable_keys(tokens, 4, "s")) == [
        hit.key for hit in cache.find_prefix(tokens, "s").hits()
    ]
    assert len(list(reusable_keys(tokens[:16], 4, "s"))) == 3
    assert next(reusable_keys(tokens, 4, "s")) == block_key(root_key("s"), tokens[:4])


def said(session):
    """Return the prefix keys in the session's next message."""
    response = engine_pb2.SessionResponse()
    session._put_prefixes(response)
    return set(response.prefixes.stored), set(response.prefixes.evicted)


def test_routers_hear_of_blocks_on_disk():
    session = Session(core=None, translate=None)
    a, b, c = (block_key(b"", [i]) for i in range(3))
    session.add_prefixes(PrefixChange(0, {a}, (), disk_stored={a, b}))
    session.add_prefixes(PrefixChange(None, (), (), disk_stored={c}, disk_removed={b}))
    response = engine_pb2.SessionResponse()
    session._put_prefixes(response)
    assert list(response.prefixes.stored) == [short_key(a)]
    assert set(response.prefixes.disk_stored) == {short_key(a), short_key(c)}
    session.add_prefixes(PrefixChange(None, (), (), disk_removed={a}))
    response = engine_pb2.SessionResponse()
    session._put_prefixes(response)
    assert response.prefixes == engine_pb2.PrefixChanges(disk_removed=[short_key(a)])


def test_a_slow_router_hears_each_block_once():
    session = Session(core=None, translate=None)
    a, b, c = (block_key(b"", [i]) for i in range(3))
    session.add_prefixes(PrefixChange(None, {c}, ()))
    assert said(session) == (set(), set()), "it was told of changes to what it does not know"
    session.add_prefixes(PrefixChange(0, {a, c}, ()))
    assert said(session) == ({short_key(a), short_key(c)}, set())
    session.add_prefixes(PrefixChange(None, {b}, {a}))
    session.add_prefixes(PrefixChange(None, {a}, {b, c}))
    assert said(session) == (set(), {short_key(c)})
