"""Scores of documents and classes of texts.

POST /score as in vLLM's API, /rerank as in Jina's, Cohere's and TEI's, /classify as in vLLM's.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from octavo.client.requests import classify_request, score_request
from octavo.client.responses import classified, scored
from octavo.router.http.bodies import OpenBody
from octavo.router.http.errors import ApiError
from octavo.router.http.no_ops import Never
from octavo.router.http.schema import prompts, strings
from octavo.router.http.texts import TextsBody, usage
from octavo.v1 import generation_pb2


class Document(OpenBody):
    """A document that is an object."""

    text: str


class ScoreRequest(TextsBody):
    """The body of POST /score: one text and others, or as many of both."""

    params: ClassVar[Mapping[str, str]] = {"queries": "text_1", "documents": "text_2"}

    text_1: Annotated[list[str], BeforeValidator(strings)]
    text_2: Annotated[list[str], BeforeValidator(strings)]
    use_activation: bool | None = None

    def message(self, request_id: str) -> generation_pb2.ScoreRequest:
        """Convert to a protobuf request; see `TextsBody.options`.

        Raises:
            InvalidArgumentError: A value does not fit its field's type.
        """
        raw = self.use_activation is False
        return score_request(self.text_1, self.text_2, raw=raw, **self.options(request_id))

    def answer(self, response: generation_pb2.ScoreResponse) -> dict[str, Any]:
        """Return the response of POST /score."""
        return {
            "id": f"score-{response.request_id}",
            "object": "list",
            "model": response.model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(scored(response).scores)
            ],
            "usage": usage(response),
        }


class RerankRequest(TextsBody):
    """The body of POST /rerank: Jina's and Cohere's with `documents`, TEI's with `texts`.

    Attributes:
        top_n: Number of documents to return, the best ones.
        return_documents: Whether results have their documents.
        return_text: The same in TEI's form.
        raw_scores: Whether scores are logits, in TEI's form.
    """

    params: ClassVar[Mapping[str, str]] = {"queries": "query"}

    query: str
    documents: list[str | Document] | None = None
    top_n: Annotated[int | None, Field(ge=1)] = None
    return_documents: bool | None = None
    use_activation: bool | None = None
    max_tokens_per_doc: Never = None
    max_chunks_per_doc: Never = None
    rank_fields: Never = None

    texts: list[str] | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.documents is None) == (self.texts is None):
            raise ApiError(400, "one of documents and texts must be given", param="documents")
        return self

    def message(self, request_id: str) -> generation_pb2.ScoreRequest:
        """Convert to a protobuf request; see `ScoreRequest.message`."""
        raw = self.use_activation is False or bool(self.raw_scores)
        return score_request(self.query, self._texts(), raw=raw, **self.options(request_id))

    def answer(
        self, response: generation_pb2.ScoreResponse
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the response of POST /rerank, the best document first."""
        scores, texts = scored(response).scores, self._texts()
        best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: self.top_n]
        if self.texts is not None:
            return [
                {"index": i, "score": scores[i], **({"text": texts[i]} if self.return_text else {})}
                for i in best
            ]
        shown = self.return_documents is not False
        return {
            "id": f"rerank-{response.request_id}",
            "object": "list",
            "model": response.model,
            "usage": usage(response),
            "results": [
                {
                    "index": i,
                    "relevance_score": scores[i],
                    **({"document": {"text": texts[i]}} if shown else {}),
                }
                for i in best
            ],
        }

    def _texts(self) -> list[str]:
        documents = self.documents if self.texts is None else self.texts
        return [each if isinstance(each, str) else each.text for each in documents or ()]


class ClassifyRequest(TextsBody):
    """The body of POST /classify."""

    params: ClassVar[Mapping[str, str]] = {"texts": "input", "tokens": "input"}

    input: Annotated[list[str] | list[list[int]], BeforeValidator(prompts)]
    use_activation: bool | None = None

    def message(self, request_id: str) -> generation_pb2.ClassifyRequest:
        """Convert to a protobuf request; see `ScoreRequest.message`."""
        raw = self.use_activation is False
        return classify_request(self.input, raw=raw, **self.options(request_id))

    def answer(self, response: generation_pb2.ClassifyResponse) -> dict[str, Any]:
        """Return the response of POST /classify."""
        result = classified(response)
        return {
            "id": f"classify-{response.request_id}",
            "object": "list",
            "model": response.model,
            "data": [
                {
                    "index": index,
                    "label": label,
                    "probs": scores.tolist(),
                    "num_classes": len(result.labels),
                }
                for index, (label, scores) in enumerate(
                    zip(result.best, result.scores, strict=True)
                )
            ],
            "usage": usage(response),
        }
