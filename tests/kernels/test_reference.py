"""The reference against PyTorch's own attention, and against arithmetic by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.kernels import reference
from octavo.kernels.sampling_tensors import SamplingTensors


def contiguous(batch, seq):
    """Return a sequence's queries, keys and values in PyTorch's layout, [heads, tokens, dim]."""
    first, last = batch.metadata.query_starts[seq : seq + 2].tolist()
    block_size = batch.key_cache.shape[2]
    table = batch.metadata.block_tables[seq].tolist()
    positions = range(int(batch.metadata.seq_lens[seq]))

    def rows(cache):
        found = [cache[table[p // block_size], :, p % block_size] for p in positions]
        return torch.stack(found, 1)

    return (
        batch.query[first:last].transpose(0, 1),
        rows(batch.key_cache),
        rows(batch.value_cache),
        slice(first, last),
    )


def attend(batch):
    return reference.paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.metadata, **batch.options
    )


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_agrees_with_scaled_dot_product_attention(harness, group, window):
    sizes = {"num_kv_heads": 2, "group": group, "sliding_window": window}
    case = harness.case(lengths=[(1, 40), (17, 17), (9, 33)], releases=False, **sizes)
    batch = harness.build(case)
    out = attend(batch)
    for seq, (queries, tokens) in enumerate(case.lengths):
        q, k, v, rows = contiguous(batch, seq)
        seen = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
        if window is not None:
            seen &= ~torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries - window)
        expected = F.scaled_dot_product_attention(
            q[None], k[None], v[None], seen, scale=case.head_dim**-0.5, enable_gqa=True
        )
        torch.testing.assert_close(out[rows], expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_cap_and_bias_by_hand(harness):
    case = harness.case(
        lengths=[(2, 5)], num_kv_heads=2, group=2, soft_cap=1.5, alibi=True, scale=0.7
    )
    batch = harness.build(case)
    out = attend(batch)
    q, k, v, _ = contiguous(batch, 0)
    for head in range(4):
        slope = 2.0 ** -(head + 1)
        for query in range(2):
            own = 3 + query
            weights = []
            for position in range(own + 1):
                logit = 0.7 * float(q[head, query] @ k[head // 2, position])
                logit = 1.5 * math.tanh(logit / 1.5) + slope * (position - own)
                weights.append(math.exp(logit))
            mixed = sum(w * v[head // 2, p] for p, w in enumerate(weights)) / sum(weights)
            torch.testing.assert_close(out[query, head], mixed, atol=1e-5, rtol=1e-5)


def test_a_query_sees_its_chunk(harness):
    case = harness.case(lengths=[(30, 45)], group=2, chunk=20, releases=False)
    batch = harness.build(case)
    q, k, v, _ = contiguous(batch, 0)
    own, keys = torch.arange(15, 45)[:, None], torch.arange(45)
    seen = (keys <= own) & (keys // 20 == own // 20)
    expected = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    torch.testing.assert_close(attend(batch), expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_a_sink_is_a_key_without_a_value(harness):
    case = harness.case(lengths=[(3, 9)], num_kv_heads=2, group=2, sinks=True)
    batch = harness.build(case)
    q, k, v, _ = contiguous(batch, 0)
    k, v = (x.repeat_interleave(2, 0) for x in (k, v))
    seen = torch.ones(3, 9, dtype=torch.bool).tril(6)
    logits = (case.head_dim**-0.5 * q @ k.transpose(1, 2)).masked_fill(~seen, -torch.inf)
    sinks = batch.options["sinks"][:, None, None].expand(-1, 3, 1)
    weights = torch.cat([sinks, logits], -1).softmax(-1)
    expected = weights @ torch.cat([torch.zeros(4, 1, case.head_dim), v], 1)
    torch.testing.assert_close(attend(batch), expected.transpose(0, 1))


def test_a_latent_keys_first_elements_are_its_value(harness):
    sizes = {"group": 4, "head_dim": 48, "value_dim": 32}
    latent = harness.build(harness.case(lengths=[(5, 20)], latent=True, **sizes))
    values = latent.key_cache[..., :32]
    options = latent.options | {"value_dim": None}
    expected = reference.paged_attention(
        latent.query, latent.key_cache, values, latent.metadata, **options
    )
    out = attend(latent)
    assert out.shape == (5, 4, 32)
    torch.testing.assert_close(out, expected)


def test_chunks_give_what_the_whole_gives(harness):
    whole = harness.build(harness.case(lengths=[(30, 30)], group=2))
    expected = attend(whole)
    for length in (1, 13, 30):
        query = whole.query[:length]
        metadata = type(whole.metadata)(
            query_starts=torch.tensor([0, length], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            block_tables=whole.metadata.block_tables,
            slot_mapping=whole.metadata.slot_mapping,
            max_query_len=length,
            max_seq_len=length,
        )
        out = reference.paged_attention(
            query, whole.key_cache, whole.value_cache, metadata, **whole.options
        )
        torch.testing.assert_close(out, expected[:length])


def test_what_is_written_is_attended_to(harness):
    batch = harness.build(harness.case(lengths=[(5, 5)]))
    key, value = torch.randn(2, 5, 1, 32)
    slots = torch.tensor([int(batch.metadata.block_tables[0, 0]) * 16 + i for i in range(5)])
    reference.write_kv(key, value, batch.key_cache, batch.value_cache, slots)
    expected = F.scaled_dot_product_attention(
        batch.query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        is_causal=True,
    )
    torch.testing.assert_close(attend(batch), expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({}, []),
        ({"temperatures": 0.6, "top_k": 7}, [TemperatureLogitsWarper(0.6), TopKLogitsWarper(7)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        (
            {"temperatures": 2.0, "top_k": 30, "top_p": 0.8, "min_p": 0.1},
            [
                TemperatureLogitsWarper(2.0),
                TopKLogitsWarper(30),
                TopPLogitsWarper(0.8),
                MinPLogitsWarper(0.1),
            ],
        ),
    ],
    ids=["plain", "top-k", "top-p", "all"],
)
def test_draws_from_what_transformers_leaves(params, warpers):
    count = 1000
    logits = 2 * torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    columns = {"temperatures": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    draws = SamplingTensors(
        **{name: np.full(count, value) for name, value in columns.items()},
        uniforms=(np.arange(count) + 0.5) / count,
    )
    tokens = reference.draw_tokens(logits.expand(count, -1), draws)
    shares = torch.bincount(tokens, minlength=40) / count
    expected = LogitsProcessorList(warpers)(torch.tensor([[0]]), logits.clone()).softmax(-1)[0]
    torch.testing.assert_close(shares, expected, atol=1 / count, rtol=0)


def test_equal_tokens_at_a_cut_are_kept_from_the_lowest_id():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0]]).expand(3, -1)
    draws = SamplingTensors.greedy(3)._replace(
        temperatures=np.array([0.0, 1.0, 1.0]),
        top_k=np.array([0, 2, 0]),
        top_p=np.array([1.0, 1.0, 0.3]),
        uniforms=np.array([0.9, 0.9, 0.9]),
    )
    assert reference.draw_tokens(logits, draws).tolist() == [1, 2, 2]
