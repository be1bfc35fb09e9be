"""Compares an encoder's hidden states and logits with those of transformers' own eager pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from octavo.engine.embedding.encoder import Encoder, Text, split_segments
from octavo.engine.models.checks.reference import row_errors
from octavo.engine.models.checks.self_check import FLOAT32_TOLERANCE, SelfCheckError

LENGTHS = (40, 1, 17, 5)
"""Tokens of the texts of the check."""
BEYOND = 40
"""Tokens by which its last text exceeds a window."""
MAX_WINDOW = 1024
"""Maximum window that a text of the check exceeds. Models with a larger one get no longer texts."""


def window_of(config: Any) -> int | None:  # noqa: ANN401 - no declared field
    """Return the tokens of a model's sliding window; None if it has none."""
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) else None


def random_texts(encoder: Encoder, config: Any) -> list[Text]:  # noqa: ANN401 - no declared fields
    """Return random texts for the check: some short ones, and one longer than a window."""
    window = window_of(config) or 0
    lengths = [*LENGTHS, min(window, MAX_WINDOW) + BEYOND]
    generator = np.random.default_rng(0)
    allowed = np.arange(config.vocab_size, dtype=np.uint32)
    allowed = allowed[allowed != getattr(config, "pad_token_id", None)]
    texts = [generator.choice(allowed, min(n, encoder.max_tokens)) for n in lengths]
    if encoder.segments is not None:
        for text in texts:
            text[len(text) // 2 :] += encoder.segments
    return texts


def _inputs(encoder: Encoder, text: Text) -> dict[str, Tensor]:
    """Return the arguments of transformers' own pass of a text."""
    ids = torch.from_numpy(text.astype(np.int64))[None]
    return split_segments(ids, encoder.segments) | {"attention_mask": torch.ones_like(ids)}


def eager_hidden(encoder: Encoder, model: PreTrainedModel, texts: Sequence[Text]) -> Tensor:
    """Return the hidden states of transformers' own pass, text by text, in float32."""
    outputs: Any = (model(**_inputs(encoder, text)) for text in texts)
    return torch.cat([output.last_hidden_state[0].float() for output in outputs])


def eager_logits(
    encoder: Encoder,
    model: Any,  # noqa: ANN401 - its class is chosen above
    texts: Sequence[Text],
    answers: Sequence[int] | None,
) -> Tensor:
    """Return the logits of transformers' own pass, text by text."""
    logits = [model(**_inputs(encoder, text)).logits for text in texts]
    if answers is None:
        return torch.cat(logits)
    chosen = torch.cat([each[:, -1, list(answers)] for each in logits])
    return chosen[:, :1] - chosen[:, 1:] if len(answers) > 1 else chosen


def check_logits(computed: Tensor, expected: Tensor) -> None:
    """Compare a classifier's logits in float32 with those of transformers.

    Raises:
        SelfCheckError: They differ.
    """
    error = float((computed - expected).abs().max() / expected.abs().max())
    if not error <= FLOAT32_TOLERANCE:  # also for NaN
        raise SelfCheckError(
            f"self-check failed: the logits of random texts differ from those of transformers by"
            f" {error:.1%} of the largest one, and the limit is {FLOAT32_TOLERANCE:.1%}"
        )


def compare_hidden(
    encoder: Encoder, texts: Sequence[Text], expected: Tensor, limit: float, how: str
) -> float:
    """Return the maximum error of hidden states: of the texts together, and of one alone.

    Raises:
        SelfCheckError: It is above the limit.
    """
    together, _ = encoder.run(texts)
    alone, _ = encoder.run(texts[-1:])
    rows = len(alone)
    errors = row_errors(
        torch.cat([together, alone]).float(), torch.cat([expected, expected[-rows:]])
    )
    error = float(errors.max())
    if not error <= limit:  # also for NaN
        raise SelfCheckError(
            f"self-check failed: {how}, the hidden states of random texts differ from those of"
            f" transformers' forward pass by {error:.1%} of their standard deviation, and the limit"
            f" is {limit:.1%}"
        )
    return error
