"""Collects the messages of a chat from the parts in which an API has them."""

import base64
from collections.abc import Sequence
from dataclasses import replace

from octavo.client import Image, Message
from octavo.router.http.errors import ApiError

SEAL = "octavo:"
"""Prefix of sealed texts."""


class Conversation:
    """Collects a chat's messages.

    Consecutive parts of one speaker become one message: many chat templates refuse two system
    messages, or two turns of a user.

    Attributes:
        messages: The messages.
        places: Where each message comes from: HTTP names by field of GenerateRequest.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.places: dict[str, str] = {}

    def add(self, message: Message, place: str) -> None:
        """Add a part.

        Args:
            message: The part, its content a list.
            place: Its name in the HTTP request.
        """
        last = self.messages[-1] if self.messages else None
        if last is None or _speaker(last) != _speaker(message) or message.role == "tool":
            self.places[f"chat.messages[{len(self.messages)}]"] = place
            self.messages.append(message)
            return
        reasoning = filter(None, (last.reasoning, message.reasoning))
        self.messages[-1] = replace(
            last,
            content=[*last.content, *message.content],
            tool_calls=[*last.tool_calls, *message.tool_calls],
            reasoning="\n".join(reasoning),
        )

    def prompt(self) -> list[Message]:
        """Return the messages, with their parts on separate lines."""
        return [replace(one, content=_joined(one.content)) for one in self.messages]


def _joined(parts: Sequence[str | Image]) -> str | Sequence[str | Image]:
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _speaker(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def seal(text: str) -> str:
    """Return reasoning in a form that clients only send back, as APIs want it; it is no secret."""
    return SEAL + base64.b64encode(text.encode()).decode()


def unseal(sealed: str, place: str) -> str | None:
    """Return sealed reasoning; None if another server sealed it.

    Args:
        sealed: What the client sent back.
        place: Its name in the HTTP request.

    Raises:
        ApiError: It is not as `seal` returned it.
    """
    if not sealed.startswith(SEAL):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(SEAL), validate=True).decode()
    except ValueError:
        raise ApiError(400, f"{place} must be sent back unchanged", param=place) from None
