"""Reference results from transformers' eager forward, one whole sequence at a time."""

from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.engine.models.attention_layers import reference_attention
from octavo.engine.sampling.random_numbers import uniforms

TOLERANCE = 1e-3
"""Maximum difference of a log-probability, and of a random number: another order of summation
differs by under 1e-4, another prompt by 2e-2."""
CLOSE = 1e-4
"""Minimum difference of beams' scores that rounding cannot reverse."""


class Search(NamedTuple):
    """A beam search's outcome.

    Attributes:
        scores: Sums of the outputs' log-probabilities, best first.
        decided: Minimum difference between the scores of a kept and a dropped beam.
    """

    scores: list[float]
    decided: float


class Eager:
    """Computes log-probabilities with transformers' own attention, which defines the model.

    Args:
        directory: The model's directory.
        dtype: Dtype of the arithmetic. PyTorch has no grouped products of experts in float64.
    """

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        own = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
        attention = reference_attention(AutoConfig.from_pretrained(directory))
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention, **own
        ).eval()
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logprobs(self, tokens: Tokens[int]) -> torch.Tensor:
        """Return log-probabilities `[num_tokens - 1, vocab_size]`, of each next token."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self._forward([list(tokens)])[0, :-1]
        return self._known[key]

    def search(self, prompt: Tokens[int], width: int, length: int) -> Search:
        """Search by beams for outputs of exactly `length` tokens, without an earlier end."""
        beams, scores, decided = [list(prompt)], torch.zeros(1, dtype=torch.float64), float("inf")
        for _ in range(length):
            continued = scores[:, None] + self._forward(beams)[:, -1]
            best = continued.flatten().topk(width + 1)
            decided = min(decided, float(best.values[-2] - best.values[-1]))
            scores, size = best.values[:width], continued.shape[1]
            beams = [[*beams[i // size], i % size] for i in best.indices[:width].tolist()]
        return Search(scores.tolist(), decided)

    @torch.inference_mode()
    def _forward(self, sequences: list[list[int]]) -> torch.Tensor:
        logits = self._model(input_ids=torch.tensor(sequences), use_cache=False).logits
        return logits.double().log_softmax(-1)


def is_drawn(token: int, row: torch.Tensor, seed: int, output: int, position: int) -> bool:
    """Return whether a seed samples this token at temperature 1.

    Args:
        token: The sampled token.
        row: `[vocab_size]` log-probabilities.
        seed: Seed of the request.
        output: Index of the output.
        position: Number of tokens sampled before in that output.
    """
    key = (np.array([number], np.uint64) for number in (seed, output, position))
    number, below = float(uniforms(*key)[0]), row.exp().cumsum(0)
    about = torch.tensor([number - TOLERANCE, number + TOLERANCE], dtype=torch.float64)
    lowest, highest = torch.searchsorted(below, about, right=True).tolist()
    return bool(lowest <= token <= highest)
