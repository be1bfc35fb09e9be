"""An embedding model: token ids of texts to embeddings, in one step without padding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize

from octavo.common.models.embedding import EmbeddingPlan, Pooling
from octavo.engine.attention.ragged import attending_within

Text = NDArray[np.uint32]
"""The token ids of a text, at least one."""


Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A step. It takes token ids `[1, num_tokens]` int64, positions of the same shape and each text's
first row and the end `[num_texts + 1]` int32; it returns hidden states `[num_tokens, size]`."""


class EagerForward(nn.Module):
    """A transformers model with ragged attention as a step.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: Tensor, positions: Tensor, starts: Tensor) -> Tensor:
        """Run the model; see `Forward`."""
        with attending_within(starts.int()):
            hidden: Tensor = self.model(
                input_ids=token_ids, position_ids=positions
            ).last_hidden_state[0]
        return hidden


@dataclass(frozen=True, slots=True)
class Encoder:
    """An embedding model: a step, and its pooling.

    Attributes:
        forward: The step.
        plan: How it embeds.
        dimensions: Elements of an embedding.
        max_tokens: Maximum tokens of a text.
        first_position: Position of a text's first token: RoBERTa and its kin begin behind the
            position of padding.
        dense: The layers that follow the pooling, in float32.
    """

    forward: Forward
    plan: EmbeddingPlan
    dimensions: int
    max_tokens: int
    first_position: int
    dense: nn.Module

    @torch.inference_mode()
    def embed(self, texts: Sequence[Text]) -> Tensor:
        """Return the embeddings of texts, not normalized: `[len(texts), dimensions]` float32."""
        hidden, starts = self.run(texts)
        embeddings: Tensor = self.dense(pool(hidden.float(), starts, self.plan.pooling))
        return embeddings

    def finish(self, embeddings: Tensor, dimensions: int) -> Tensor:
        """Return the leading dimensions of embeddings, normalized if the model's are."""
        leading = embeddings[:, :dimensions]
        return normalize(leading, dim=1) if self.plan.normalize else leading.contiguous()

    @torch.inference_mode()
    def run(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
        """Return the hidden states of all tokens, and each text's first row and the end."""
        lengths = [len(text) for text in texts]
        starts = torch.zeros(len(texts) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(lengths).cumsum(0)
        positions = [torch.arange(length) + self.first_position for length in lengths]
        token_ids = torch.from_numpy(np.concatenate(texts).astype(np.int64))
        return self.forward(token_ids[None], torch.cat(positions)[None], starts), starts.long()


def pool(hidden: Tensor, starts: Tensor, pooling: Pooling) -> Tensor:
    """Return one row for each text.

    Args:
        hidden: `[num_tokens, size]` float32.
        starts: `[num_texts + 1]` int64: each text's first row, and the end.
        pooling: How rows become one.
    """
    match pooling:
        case "cls":
            return hidden[starts[:-1]]
        case "last":
            return hidden[starts[1:] - 1]
        case "mean" | "max":
            return torch.segment_reduce(hidden, pooling, lengths=starts.diff())
