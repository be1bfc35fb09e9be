"""The embeddings of texts: POST /v1/embeddings, as OpenAI's API, and POST /embed, as TEI's."""

import math
from array import array
from base64 import b64encode
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from octavo.client.requests import embed_request
from octavo.client.responses import embeddings
from octavo.router.http.no_ops import only
from octavo.router.http.schema import prompts
from octavo.router.http.texts import TextsBody, usage
from octavo.v1 import generation_pb2

Inputs = Annotated[list[str] | list[list[int]], BeforeValidator(prompts)]
Dimensions = Annotated[int | None, Field(ge=1, lt=1 << 32)]


class EmbeddingsRequest(TextsBody):
    """The body of POST /v1/embeddings."""

    params: ClassVar[Mapping[str, str]] = {"texts": "input", "tokens": "input"}

    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Dimensions = None
    prompt_name: str | None = None
    normalize: Annotated[bool | None, only()] = None

    def message(self, request_id: str) -> generation_pb2.EmbedRequest:
        """Convert to a protobuf request; see `TextsBody.options`.

        Raises:
            InvalidArgumentError: A value does not fit its field's type.
        """
        return embed_request(
            self.input,
            dimensions=self.dimensions,
            prompt_name=self.prompt_name,
            **self.options(request_id),
        )

    def answer(self, response: generation_pb2.EmbedResponse) -> dict[str, Any]:
        """Return the response of POST /v1/embeddings."""
        return {
            "object": "list",
            "id": f"embd-{response.request_id}",
            "model": response.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": self._encoded(embedding)}
                for index, embedding in enumerate(embeddings(response))
            ],
            "usage": usage(response),
        }

    def _encoded(self, embedding: "array[float]") -> str | list[float]:
        if self.encoding_format == "float":
            return embedding.tolist()
        return b64encode(embedding.tobytes()).decode()


class EmbedRequest(TextsBody):
    """The body of POST /embed, whose embeddings always have length 1."""

    params: ClassVar[Mapping[str, str]] = {"texts": "inputs", "tokens": "inputs"}

    inputs: Inputs
    dimensions: Dimensions = None
    prompt_name: str | None = None
    normalize: Annotated[bool | None, only(True)] = None

    def message(self, request_id: str) -> generation_pb2.EmbedRequest:
        """Convert to a protobuf request; see `EmbeddingsRequest.message`."""
        return embed_request(
            self.inputs,
            dimensions=self.dimensions,
            prompt_name=self.prompt_name,
            **self.options(request_id),
        )

    def answer(self, response: generation_pb2.EmbedResponse) -> list[list[float]]:
        """Return the response of POST /embed."""
        return [_normalized(embedding) for embedding in embeddings(response)]


def _normalized(embedding: "array[float]") -> list[float]:
    length = math.sqrt(sum(each * each for each in embedding)) or 1.0
    return [each / length for each in embedding]
