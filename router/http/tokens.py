"""POST /tokenize: the tokens that a prompt or a chat would be."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from octavo.client import Prompt
from octavo.router.http.errors import ApiError
from octavo.router.http.schema import ChatMessage, Strict
from octavo.v1 import generation_pb2


class TokenizeRequest(Strict):
    """The body: one of `prompt` and `messages`."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "one of prompt and messages must be given", param="prompt")
        return self

    @property
    def text_or_chat(self) -> Prompt:
        """The body of POST /tokenize."""
        if self.messages is not None:
            return [message.message() for message in self.messages]
        return self.prompt or ""


def answer(response: generation_pb2.TokenizeResponse) -> dict[str, Any]:
    """Return the answer's JSON."""
    tokens = list(response.token_ids)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": response.max_model_len}
