"""POST /v1/embeddings: the embeddings of texts, as floats or in base64."""

from array import array
from base64 import b64encode
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model

from octavo.client.requests import embed_request
from octavo.client.responses import embeddings
from octavo.router.http import no_ops
from octavo.router.http.bodies import OpenBody
from octavo.router.http.no_ops import only
from octavo.router.http.schema import MAX_REQUEST_ID, prompts
from octavo.v1 import generation_pb2

PARAMS = {"texts": "input", "tokens": "input"}
"""HTTP names of fields of EmbedRequest."""
if TYPE_CHECKING:
    Refused = OpenBody
else:
    Refused = create_model("Refused", __base__=OpenBody, **no_ops.members(no_ops.EMBEDDINGS))


class EmbeddingsRequest(Refused):
    """The body of POST /v1/embeddings.

    Attributes:
        truncate: Whether longer texts are cut, as `truncate_prompt_tokens: -1` says too.
    """

    model: str = ""
    input: Annotated[list[str] | list[list[int]], BeforeValidator(prompts)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Field(ge=1, lt=1 << 32)] = None
    prompt_name: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: Annotated[int | None, only(-1)] = None
    priority: int | None = None
    request_id: Annotated[str | None, Field(max_length=MAX_REQUEST_ID)] = None
    user: str | None = None

    def message(self, request_id: str) -> generation_pb2.EmbedRequest:
        """Convert to a protobuf request.

        Args:
            request_id: The id of a request that names none.

        Raises:
            InvalidArgumentError: A value does not fit its field's type.
        """
        return embed_request(
            self.input,
            model=self.model,
            dimensions=self.dimensions,
            prompt_name=self.prompt_name,
            truncate=bool(self.truncate) or self.truncate_prompt_tokens is not None,
            priority=self.priority or 0,
            request_id=self.request_id or request_id,
        )

    def answer(self, response: generation_pb2.EmbedResponse) -> dict[str, Any]:
        """Return the response of POST /v1/embeddings."""
        tokens = sum(response.token_counts)
        return {
            "object": "list",
            "id": f"embd-{response.request_id}",
            "model": response.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": self._encoded(embedding)}
                for index, embedding in enumerate(embeddings(response))
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _encoded(self, embedding: "array[float]") -> str | list[float]:
        if self.encoding_format == "float":
            return embedding.tolist()
        return b64encode(embedding.tobytes()).decode()
