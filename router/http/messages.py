"""Chat messages in OpenAI's form."""

from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from octavo.client import Image, Message, ToolCall
from octavo.router.http.bodies import OpenBody
from octavo.router.http.errors import UNSUPPORTED, WRONG_TYPE
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


class ImageUrl(OpenBody):
    """The URL of an image, and how closely to look."""

    url: Annotated[str, Field(min_length=1)]
    detail: str | None = None

    def image(self) -> Image:
        """Convert to the client's `Image`."""
        return Image(url=self.url, detail=self.detail or "")


def with_url(value: object) -> object:
    """Return the object for an image's URL, which some clients send alone."""
    return {"url": value} if isinstance(value, str) else value


Url = TypeVar("Url", ImageUrl, str)


def check_image(image: Url | None, info: ValidationInfo, kind: str) -> Url | None:
    """Return a part's image, which parts of the type `kind` must have, and no others may have."""
    if info.data.get("type", kind) == kind and not image:
        raise PydanticCustomError(WRONG_TYPE, "must be set")
    if info.data.get("type") != kind and image is not None:
        raise PydanticCustomError(UNSUPPORTED, f"belongs to parts of type {kind}")
    return image


class ChatPart(TextPart):
    """A part of a chat's message: text, or an image."""

    type: Annotated[str, only("text", "image_url")]
    image_url: Annotated[
        ImageUrl | None, BeforeValidator(with_url), Field(validate_default=True)
    ] = None

    @field_validator("image_url")
    @classmethod
    def _check_image(cls, value: ImageUrl | None, info: ValidationInfo) -> ImageUrl | None:
        return check_image(value, info, "image_url")

    def part(self) -> str | Image:
        """Convert to a part of the client's `Message`."""
        return self.text if self.image_url is None else self.image_url.image()


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
    content: Annotated[list[ChatPart], BeforeValidator(parts), Field(default_factory=list)]
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
        parts = [part.part() for part in self.content]
        return Message(
            self.role,
            parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts,
            tool_calls=[call.call() for call in self.tool_calls or ()],
            tool_call_id=self.tool_call_id or "",
            reasoning=self.reasoning_content or self.reasoning or "",
            name=self.name or "",
        )
