"""Log-probabilities of tokens."""

from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """Log-probabilities of each row's given token and of its most likely tokens.

    Attributes:
        logprobs: `[n]` float32, of the given tokens.
        top: `[n, most]` int64, the most likely tokens, most likely first.
        top_logprobs: `[n, most]` float32, of `top`.
    """

    logprobs: Tensor
    top: Tensor
    top_logprobs: Tensor


def score_tokens(logits: Tensor, tokens: Tensor, most: int) -> Scores:
    """Return log-probabilities in plain PyTorch; see `octavo.kernels.logits.score_tokens`."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = logprobs.topk(most, dim=-1)
    return Scores(logprobs.gather(1, tokens[:, None])[:, 0], top.indices, top.values)
