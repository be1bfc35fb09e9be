"""A model of texts: token ids to embeddings or logits, in one step without padding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo.common.models.classification import ClassifierPlan
from octavo.common.models.embedding import EmbeddingPlan, Pooling
from octavo.engine.attention.ragged import attending_within

TINY = np.float32(1e-12)
"""Minimum divisor of an embedding that is normalized, as in PyTorch."""
Text = NDArray[np.uint32]
"""The token ids of a text, at least one. Those of a pair's second text are higher by the size of
the vocabulary, if the model tells the two apart."""


Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A step. It takes token ids `[1, num_tokens]` int64, positions of the same shape and each text's
first row and the end `[num_texts + 1]` int32; it returns hidden states `[num_tokens, size]`."""


class EagerForward(nn.Module):
    """A transformers model with ragged attention as a step.

    Args:
        model: The model.
        segments: Size of the vocabulary, if the model tells a pair's texts apart; else None.
    """

    def __init__(self, model: nn.Module, segments: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.segments = segments

    def forward(self, token_ids: Tensor, positions: Tensor, starts: Tensor) -> Tensor:
        """Run the model; see `Forward`."""
        inputs = split_segments(token_ids, self.segments)
        with attending_within(starts.int()):
            hidden: Tensor = self.model(**inputs, position_ids=positions).last_hidden_state[0]
        return hidden


def split_segments(token_ids: Tensor, segments: int | None) -> dict[str, Tensor]:
    """Return a model's arguments for the token ids of texts; see `EagerForward`."""
    if segments is None:
        return {"input_ids": token_ids}
    second = (token_ids >= segments).long()
    return {"input_ids": token_ids - second * segments, "token_type_ids": second}


@dataclass(frozen=True, slots=True)
class Encoder:
    """A model of texts: a step, its pooling and its head.

    Attributes:
        forward: The step.
        plan: What it makes of texts.
        pooling: How a text's hidden states become one.
        head: The layers that follow the pooling, in float32.
        dimensions: Elements of an embedding, or number of classes.
        max_tokens: Maximum tokens of a text.
        first_position: Position of a text's first token: RoBERTa and its kin begin behind the
            position of padding.
        segments: See `EagerForward`.
    """

    forward: Forward
    plan: EmbeddingPlan | ClassifierPlan
    pooling: Pooling
    head: nn.Module
    dimensions: int
    max_tokens: int
    first_position: int
    segments: int | None

    @torch.inference_mode()
    def embed(self, texts: Sequence[Text]) -> Tensor:
        """Return the embeddings of texts, not normalized, or their logits.

        Returns:
            `[len(texts), dimensions]` float32.
        """
        hidden, starts = self.run(texts)
        embeddings: Tensor = self.head(pool(hidden.float(), starts, self.pooling))
        return embeddings

    def finish(self, embeddings: Tensor, dimensions: int | None, *, raw: bool) -> Tensor:
        """Return the embeddings or scores that clients get, of `embed`'s results.

        Args:
            embeddings: The results.
            dimensions: Number of leading dimensions to return; None: all.
            raw: Whether to return logits as they are. Embeddings are normalized if the model's are.
        """
        if isinstance(self.plan, EmbeddingPlan):
            leading = embeddings[:, :dimensions]
            return _normalized(leading) if self.plan.normalize else leading.contiguous()
        if raw or self.plan.activation == "identity":
            return embeddings
        if self.plan.activation == "sigmoid":
            return embeddings.sigmoid()
        return embeddings.softmax(1)

    @torch.inference_mode()
    def run(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
        """Return the hidden states of all tokens, and each text's first row and the end."""
        # NumPy takes less time than PyTorch for a few rows, much of a short text's time.
        lengths = [len(text) for text in texts]
        starts = np.array([0, *accumulate(lengths)])
        token_ids = np.concatenate(texts, dtype=np.int64)
        positions = np.concatenate([np.arange(length) for length in lengths])
        positions += self.first_position
        rows = torch.from_numpy(starts)
        hidden = self.forward(
            torch.from_numpy(token_ids)[None], torch.from_numpy(positions)[None], rows.int()
        )
        return hidden, rows


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
        case "mean":
            sums = np.add.reduceat(hidden.numpy(), starts[:-1].numpy())
            return torch.from_numpy(sums / np.diff(starts.numpy())[:, None].astype(np.float32))
        case "max":
            return torch.from_numpy(np.maximum.reduceat(hidden.numpy(), starts[:-1].numpy()))


def _normalized(rows: Tensor) -> Tensor:
    """Return rows `[num_rows, size]` divided by their lengths; zeros stay zeros."""
    given = rows.numpy()
    return torch.from_numpy(given / np.maximum(np.linalg.norm(given, axis=1, keepdims=True), TINY))
