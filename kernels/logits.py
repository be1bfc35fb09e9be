"""The operations on logits, each on the device of its tensors."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from octavo.kernels.backend import find_backend
from octavo.kernels.sampling_tensors import SamplingTensors
from octavo.kernels.scores import Scores


def argmax(rows: Tensor) -> Tensor:
    """Return the column of each row's greatest element, the first on a tie.

    Args:
        rows: `[n, columns]`, of one of `DTYPES`.

    Returns:
        `[n]` int64; any column for a row with NaN.
    """
    return find_backend(rows.device.type).argmax(rows)


def mask_logits(logits: Tensor, rows: Sequence[int], masks: np.ndarray) -> None:
    """Mask logits in place: make the tokens that a bit mask excludes impossible.

    Args:
        logits: `[n, vocab_size]`, of one of `DTYPES`, rows contiguous; masked tokens become minus
            infinity.
        rows: The rows to change, each once.
        masks: `[len(rows), words]` int32 on the host: bit `i % 32` of word `i // 32` allows token
            i. Tokens past the mask's end are masked too.

    Raises:
        ValueError: The number of masks is not the number of rows.
        IndexError: A row is out of range.
    """
    numbers = np.array(rows, np.int64)
    if masks.dtype != np.int32 or masks.ndim != 2 or len(masks) != len(numbers):
        raise ValueError(f"{len(numbers)} rows need as many masks of int32, not {masks.shape}")
    if not len(numbers):
        return
    if numbers.min() < 0 or numbers.max() >= len(logits):
        raise IndexError(f"a row is out of range [0, {len(logits)}): {numbers.tolist()}")
    backend = find_backend(logits.device.type)
    backend.mask_logits(logits, numbers, np.ascontiguousarray(masks))


def draw_tokens(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Sample a token from each row.

    Probabilities are the softmax of the row over its temperature. Top-k keeps the k most likely
    tokens. Of those, top-p keeps the fewest most likely tokens whose share of the sum is at least
    p. Of those, min-p keeps tokens at least that fraction as likely as the most likely one. On a
    tie at a cut, the lowest ids are kept (without a C++ compiler, any of them). The sampled token
    is the first at which the running sum of the kept weights, in the vocabulary's order, exceeds
    the row's uniform number times their total. So a row's token does not depend on other rows.

    Args:
        logits: `[n, vocab_size]`. Minus infinity means impossible.
        sampling: Each row's parameters. Temperature 0 takes the most likely token, the lowest id on
            a tie.

    Returns:
        `[n]` int64, always in the vocabulary, even if logits are NaN.
    """
    return find_backend(logits.device.type).draw_tokens(logits, sampling)


def score_tokens(logits: Tensor, tokens: Tensor, most: int) -> Scores:
    """Return log-probabilities, by a softmax over each row.

    Args:
        logits: `[n, vocab_size]`, of one of `DTYPES`.
        tokens: `[n]` int64, the token of each row to return the log-probability of.
        most: Number of each row's most likely tokens to return as well.

    Raises:
        ValueError: The vocabulary has fewer than `most` tokens.
    """
    if not 0 <= most <= logits.shape[1]:
        raise ValueError(f"cannot return {most} tokens of a vocabulary of {logits.shape[1]}")
    return find_backend(logits.device.type).score_tokens(logits, tokens, most)
