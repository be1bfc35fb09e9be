"""POST /tokenize and /detokenize: token ids of a prompt or chat, and the reverse."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from octavo.client import Prompt
from octavo.client.requests import detokenize_request, tokenize_request
from octavo.router.http.errors import ApiError
from octavo.router.http.messages import ChatMessage
from octavo.router.http.no_ops import Never
from octavo.router.http.schema import ChatLayoutOptions, SpecialTokens
from octavo.v1 import generation_pb2


class TokenizeRequest(ChatLayoutOptions):
    """The body of POST /tokenize: either `prompt` or `messages`."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: Never = None
    truncate_prompt_tokens: Never = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "one of prompt and messages must be given", param="prompt")
        return self

    def message(self) -> generation_pb2.TokenizeRequest:
        """Convert to a protobuf request.

        Raises:
            InvalidArgumentError: Chat options were given with a text prompt.
        """
        prompt: Prompt = self.prompt or ""
        if self.messages is not None:
            prompt = [message.message() for message in self.messages]
        return tokenize_request(prompt, self.model, self.chat_options(), self.add_special_tokens)


class DetokenizeRequest(SpecialTokens):
    """The body of POST /detokenize."""

    model: str = ""
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 32)]]

    def message(self) -> generation_pb2.DetokenizeRequest:
        """Convert to a protobuf request."""
        keeps = self.keeps_special_tokens is not False
        return detokenize_request(self.tokens, self.model, keeps)


def answer(response: generation_pb2.TokenizeResponse) -> dict[str, Any]:
    """Return the response of POST /tokenize."""
    tokens = list(response.token_ids)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": response.max_model_len}
