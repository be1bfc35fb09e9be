"""A step: the function that computes logits, with the model eager, traced or compiled.

It takes token ids `[1, num_tokens]` int64, positions `[1, num_tokens]` int64 and the rows to return
logits of, `[num_rows]` int64, at least one. It returns logits `[num_rows, vocab_size]`. It runs
within `attending`.
"""

from collections.abc import Callable

import torch

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class EagerForward(torch.nn.Module):
    """A transformers model as a step."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Run the model; see this module's text."""
        output = self.model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
