"""Chat messages in OpenAI's form."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from octavo.client import Message, ToolCall
from octavo.router.http.bodies import OpenBody
from octavo.router.http.errors import WRONG_TYPE
from octavo.router.http.no_ops import Never, only


def parts(content: object) -> object:
    """Return a message's content as a list of parts."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise PydanticCustomError(WRONG_TYPE, "must be a string or a list of parts")


class TextPart(OpenBody):
    """A part of a message; only text is supported."""

    type: Annotated[str, only("text")]
    text: str = ""
    # Members of other types, which `type` rejects.
    image_url: Never = None
    image: Never = None
    input_audio: Never = None
    video_url: Never = None
    audio_url: Never = None
    file: Never = None


class FunctionCall(OpenBody):
    """A called function, with its arguments as a JSON string."""

    name: str
    arguments: str


class MessageCall(OpenBody):
    """A tool call in an assistant's message."""

    type: Annotated[str, only("function")] = "function"
    id: str
    function: FunctionCall
    custom: Never = None

    def call(self) -> ToolCall:
        """Convert to the client's `ToolCall`."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


class ChatMessage(OpenBody):
    """A chat message; a response's message may be sent back unchanged."""

    role: str
    content: Annotated[list[TextPart], BeforeValidator(parts), Field(default_factory=list)]
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Never = None
    audio: Never = None
    function_call: Annotated[Any, only({})] = None
    images: Annotated[Any, only([])] = None
    # These would make the response continue this message.
    prefix: Annotated[Any, only(False)] = None
    partial: Annotated[Any, only(False)] = None

    def message(self) -> Message:
        """Convert to the client's `Message`."""
        parts = [part.text for part in self.content]
        return Message(
            self.role,
            parts[0] if len(parts) == 1 else parts,
            tool_calls=[call.call() for call in self.tool_calls or ()],
            tool_call_id=self.tool_call_id or "",
            reasoning=self.reasoning_content or self.reasoning or "",
            name=self.name or "",
        )
