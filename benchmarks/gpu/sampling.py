"""Time the sampling of a step's tokens, compared with sorting the vocabulary."""

import numpy as np
import torch

from benchmarks.gpu.result import Row
from benchmarks.gpu.timing import Timer
from octavo.kernels.logits import draw_tokens
from octavo.kernels.sampling_tensors import SamplingTensors

ROWS, VOCAB_SIZE = 64, 128_256  # Llama 3's
SPREAD = 2.5
"""Standard deviation of the logits: some thousands of tokens hold 90% of the weight."""
DIFFERENT_ALLOWED = 0.05
"""Maximum share of tokens that may differ because sums round differently."""
CASES = {
    "temperature": {},
    "top-p": {"top_p": 0.95},
    "top-k": {"top_k": 50},
    "top-k, top-p, min-p": {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
}


def time_sampling(timer: Timer, tiny: bool) -> list[Row]:
    """Time rows with equal sampling parameters.

    Raises:
        ArithmeticError: More tokens differ from the sort's than rounding explains.
    """
    rows, vocab_size = (4, 500) if tiny else (ROWS, VOCAB_SIZE)
    logits = SPREAD * torch.randn((rows, vocab_size), device=timer.device)
    results = []
    for case, params in CASES.items():
        draws = _draws(rows, **params)
        different = (draw_tokens(logits, draws) != draw_by_sorting(logits, draws)).float()
        error = float(different.mean())
        if error > DIFFERENT_ALLOWED:
            raise ArithmeticError(f"{case}: {error:.0%} of the tokens differ from the sort's")
        results.append(
            Row(
                f"{rows} x {vocab_size} {case}",
                timer.time(lambda draws=draws: draw_tokens(logits, draws)),
                moved=logits.nbytes,
                error=error,
                notes=["sampling: error is the share of tokens that differ from the sort's"],
                peers={"sorted": timer.time(lambda draws=draws: draw_by_sorting(logits, draws))},
            )
        )
    return results


def _draws(rows: int, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingTensors:
    return SamplingTensors(
        temperatures=np.full(rows, 0.8),
        top_k=np.full(rows, top_k),
        top_p=np.full(rows, top_p),
        min_p=np.full(rows, min_p),
        uniforms=np.random.default_rng(0).random(rows),
    )


def draw_by_sorting(logits: torch.Tensor, draws: SamplingTensors) -> torch.Tensor:
    """Sample a token from each row by sorting all its logits, the baseline of `draw_tokens`."""
    temperature, top_k, top_p, min_p, uniform = (
        torch.from_numpy(column).to(logits.device)[:, None] for column in draws
    )
    top_k = torch.where(top_k > 0, top_k, logits.shape[1])
    ordered, ids = (logits / temperature.float()).sort(dim=-1, descending=True, stable=True)
    weights = torch.exp(ordered - ordered[:, :1])
    weights *= torch.arange(logits.shape[1], device=logits.device) < top_k
    before = weights.cumsum(dim=-1) - weights
    weights *= ((before < top_p.float() * weights.sum(dim=-1, keepdim=True)) | (top_p >= 1)) & (
        weights >= min_p
    )
    running = (
        torch.zeros_like(weights).scatter_(1, ids, weights).cumsum(dim=-1, dtype=torch.float64)
    )
    return torch.searchsorted(running, uniform * running[:, -1:], right=True)[:, 0]
