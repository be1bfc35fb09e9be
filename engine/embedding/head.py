"""The heads of classifiers: pooled hidden states to logits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions


class ClassificationHead(nn.Module):
    """A classifier without its encoder: its own code computes logits of pooled hidden states.

    Args:
        model: The classifier; its encoder is replaced.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        base: Any = model.base_model
        self._given = _Given(getattr(base, "pooler", None))
        if self._given.pooler is not None:
            base.pooler = None
        setattr(model, model.base_model_prefix, self._given)
        config: Any = model.config.get_text_config()
        config.pad_token_id = -1  # each text is one row here, which is never padding
        self.model = model

    def forward(self, pooled: Tensor) -> Tensor:
        """Return logits `[num_texts, num_labels]` of hidden states `[num_texts, size]`."""
        self._given.hidden = pooled[:, None]
        token_ids = torch.zeros((len(pooled), 1), dtype=torch.int64)
        logits: Tensor = self.model(input_ids=token_ids).logits
        return logits


class AnswerHead(nn.Module):
    """The logit of a language model's answer, less that of the opposite answer if it has one.

    Args:
        model: The language model.
        answers: The tokens of the answers.
    """

    def __init__(self, model: PreTrainedModel, answers: Sequence[int]) -> None:
        super().__init__()
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.weight = _difference(head.weight, answers)
        self.bias = None if head.bias is None else _difference(head.bias, answers)

    def forward(self, pooled: Tensor) -> Tensor:
        """Return logits `[num_texts, 1]` of hidden states `[num_texts, size]`."""
        return linear(pooled, self.weight[None], self.bias)


def _difference(rows: Tensor, answers: Sequence[int]) -> Tensor:
    """Return the first answer's row, less the second's if there is one."""
    first, *second = (rows[answer].float() for answer in answers)
    return first - second[0] if second else first.clone()


class _Given(nn.Module):
    """Returns hidden states that are set before, in place of computing them."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.hidden = Tensor()
        self.pooler = pooler

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPoolingAndCrossAttentions:
        pooled = None if self.pooler is None else self.pooler(self.hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=self.hidden,
            pooler_output=pooled,
        )
