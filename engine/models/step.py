"""What computes a step's logits: the model as it is, or compiled.

A step is a function of token ids `[1, num_tokens]` int64, positions `[1,
num_tokens]` int64 and the rows `[num_rows]` int64 whose logits are wanted, at
least one; it returns them, `[num_rows, vocab_size]`. It runs within `attending`.
"""

from collections.abc import Callable

import torch

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class EagerStep(torch.nn.Module):
    """A transformers model as a step."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Runs the model; see the module."""
        output = self.model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
