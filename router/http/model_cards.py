"""GET /v1/models: the models that are served, in the form of OpenAI's or Anthropic's API."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from octavo.client.responses import default_sampling, state_name
from octavo.v1.generation_pb2 import ModelCard

Cards = Mapping[str, ModelCard]
"""Models under each of their names."""


def openai_card(card: ModelCard, name: str, created: int) -> dict[str, Any]:
    """Return a model as OpenAI's API shows it, with Octavo's own members added.

    Args:
        card: The model.
        name: One of its names.
        created: Time in `created`, in seconds since 1970.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "octavo",
        "root": card.name,
        "parent": card.base_model or None,
        "max_model_len": card.max_model_len or None,
        "status": {"value": state_name(card)},
        "default_sampling": default_sampling(card),
        "default_max_tokens": (
            card.default_max_tokens if card.HasField("default_max_tokens") else None
        ),
    }


def anthropic_card(card: ModelCard, name: str, created: int) -> dict[str, Any]:
    """Return a model as Anthropic's API shows it; see `openai_card`."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len or None,
        "max_tokens": card.max_model_len or None,
    }


def openai_list(cards: Cards, created: int) -> dict[str, Any]:
    """Return all models as OpenAI's API lists them."""
    data = [openai_card(cards[name], name, created) for name in sorted(cards)]
    return {"object": "list", "data": data}


def anthropic_list(cards: Cards, created: int) -> dict[str, Any]:
    """Return all models as Anthropic's API lists them, on one page."""
    names = sorted(cards)
    return {
        "data": [anthropic_card(cards[name], name, created) for name in names],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }
