"""A step: the function that computes logits, with the model eager, traced or compiled.

It takes token ids `[1, num_tokens]` int64, positions `[1, num_tokens]` int64 and the rows to return
logits of, `[num_rows]` int64, at least one. It returns logits `[num_rows, vocab_size]`. It runs
within `attending`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class EagerForward(torch.nn.Module):
    """A transformers model as a step."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Run the model; see this module's text."""
        return self._logits(positions, logit_rows, input_ids=token_ids)

    def with_images(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        rows: torch.Tensor,
        embeddings: torch.Tensor,
    ) -> torch.Tensor:
        """Run the model with some tokens' embeddings replaced.

        Args:
            token_ids: See this module's text.
            positions: See this module's text, or `[3, 1, num_tokens]`.
            logit_rows: See this module's text.
            rows: `[n]` int64, the tokens.
            embeddings: `[1 + deep, n, hidden_size]`, their embeddings, and what is added to their
                hidden states behind each of the first layers.
        """
        embedded = self.model.get_input_embeddings()(token_ids)
        embedded[0, rows] = embeddings[0].to(embedded.dtype)
        hooks = []
        if len(embeddings) > 1:
            layers = self.model.base_model.language_model.layers
            hooks = [  # before a stage's last layer sends its hidden states
                layer.register_forward_hook(partial(_add_to, rows, added), prepend=True)
                for layer, added in zip(layers, embeddings[1:], strict=False)
            ]
        try:
            return self._logits(positions, logit_rows, inputs_embeds=embedded)
        finally:
            for hook in hooks:
                hook.remove()

    def _logits(
        self, positions: torch.Tensor, logit_rows: torch.Tensor, **tokens: torch.Tensor
    ) -> torch.Tensor:
        output = self.model(
            **tokens, position_ids=positions, use_cache=False, logits_to_keep=logit_rows
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _add_to(
    rows: torch.Tensor, added: torch.Tensor, _: object, __: object, hidden: torch.Tensor
) -> torch.Tensor:
    """Add to some rows of a layer's hidden states, `[1, num_tokens, hidden_size]`."""
    hidden = hidden.clone()
    hidden[0, rows] += added.to(hidden.dtype)
    return hidden
