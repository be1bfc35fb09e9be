"""Log-probabilities over gRPC give the same perplexity as transformers' own loss."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.perplexity import Score, served_logprobs
from octavo import Client

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having"


def test_served_perplexity_is_transformers_own(served, demo_model):
    tokens = AutoTokenizer.from_pretrained(demo_model)(TEXT * 4).input_ids
    with Client(served.address) as client:
        score = Score([served_logprobs(client, tokens)], 0.0)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.bfloat16)
    batch = torch.tensor([tokens])
    with torch.inference_mode():
        loss = float(model(batch, labels=batch).loss)
    assert score.tokens == len(tokens) - 1
    # bfloat16 rounds differently in other kernels; a wrong token or shift is far off.
    assert score.perplexity() == pytest.approx(math.exp(loss), rel=0.02)
