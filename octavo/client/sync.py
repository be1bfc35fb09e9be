"""The synchronous client."""

from collections.abc import Iterator, Sequence
from typing import Any, Self, Unpack, overload

import grpc
from grpc_health.v1 import health_pb2

from octavo.client import requests, responses
from octavo.client.core import BaseClient, BaseStream
from octavo.client.errors import Error, from_rpc_error
from octavo.client.prompts import Prompt
from octavo.client.structured import T, constrained, instance
from octavo.client.types import Classes, Completion, Delta, Embeddings, Event, Model, Scores
from octavo.common.sampling_parameters import ChatOptions, GenerateOptions
from octavo.v1 import generation_pb2 as pb


class Stream(BaseStream):
    """The response stream of one request. Read it once.

    Iterate over it for the text, over `events()` for all events, or get the whole with `text()`
    or `complete()`. Leaving the loop, `close()` and the end of a `with` block cancel the request.
    """

    def __init__(self, call: "grpc._CallIterator[pb.GenerateResponse]") -> None:
        super().__init__(call)
        self._call = call

    def events(self) -> Iterator[Event]:
        """Yield every event.

        Raises:
            Error: The request failed.
        """
        try:
            for response in self._call:
                if (event := self._decode(response)) is not None:
                    yield event
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            self.close()

    def __iter__(self) -> Iterator[Delta]:
        """Yield the pieces of text."""
        return (event for event in self.events() if isinstance(event, Delta))

    def complete(self) -> Completion:
        """Wait for the end; return the whole result.

        Raises:
            Error: The request failed.
        """
        for _ in self.events():
            pass
        return self._gathering.result()

    def text(self) -> str:
        """Wait for the end; return the first output's text.

        Raises:
            Error: The request failed.
        """
        return self.complete().text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(BaseClient[Stream]):
    """A client of an Octavo router. Threads may share it; see `BaseClient` for the arguments."""

    _insecure_channel = staticmethod(grpc.insecure_channel)
    _secure_channel = staticmethod(grpc.secure_channel)
    _make_stream = Stream

    @overload
    def complete(
        self,
        prompt: Prompt,
        *,
        schema: None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion: ...

    @overload
    def complete(
        self,
        prompt: Prompt,
        *,
        schema: type[T],
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> T: ...

    def complete(
        self,
        prompt: Prompt,
        *,
        schema: type[T] | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion | T:
        """Return the whole result, or an instance of `schema`.

        Args:
            prompt: Text, messages or token ids.
            schema: A pydantic model, or another type with a JSON Schema in pydantic, to which the
                output is constrained.
            timeout: Deadline in seconds.
            **options: See GenerateOptions.

        Raises:
            OutputError: The output was truncated, or a validator of `schema` rejects it.
            Error: The request failed.
        """
        stream = self.generate(prompt, timeout=timeout, **constrained(options, schema))
        return instance(stream.complete(), schema)

    def embed(
        self,
        texts: requests.Texts,
        *,
        timeout: float | None = None,
        **options: Unpack[requests.EmbedOptions],
    ) -> Embeddings:
        """Return the embeddings of one text or several, at most 2,048.

        Args:
            texts: The texts, as strings or token ids.
            timeout: Maximum seconds to wait.
            options: See `EmbedOptions` and `TextsOptions`.

        Raises:
            Error: The call failed.
        """
        request = requests.embed_request(texts, **options)
        return responses.embedded(self._call(self._stub.Embed, request, timeout))

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        timeout: float | None = None,
        **options: Unpack[requests.ScoreOptions],
    ) -> Scores:
        """Return how well documents, at most 2,048, answer a query, by a cross-encoder.

        Args:
            query: The query of all documents, or one for each.
            documents: The documents.
            timeout: Maximum seconds to wait.
            options: See `ScoreOptions` and `TextsOptions`.

        Raises:
            Error: The call failed.
        """
        request = requests.score_request(query, documents, **options)
        return responses.scored(self._call(self._stub.Score, request, timeout))

    def classify(
        self,
        texts: requests.Texts,
        second_texts: str | Sequence[str] = (),
        *,
        timeout: float | None = None,
        **options: Unpack[requests.ScoreOptions],
    ) -> Classes:
        """Return the scores of each class of one text or several, at most 2,048.

        Args:
            texts: The texts, as strings or token ids.
            second_texts: The second text of each pair, such as a hypothesis. Default: none, texts
                stand alone.
            timeout: Maximum seconds to wait.
            options: See `ScoreOptions` and `TextsOptions`.

        Raises:
            Error: The call failed.
        """
        request = requests.classify_request(texts, second_texts, **options)
        return responses.classified(self._call(self._stub.Classify, request, timeout))

    def tokenize(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> tuple[int, ...]:
        """Return the tokens that `generate` would use for a text or a chat.

        Args:
            prompt: The text or chat.
            model: Name of the model; needed if several are served.
            add_special_tokens: Whether to add the tokenizer's special tokens. Default: for text
                only.
            timeout: Maximum seconds to wait.
            options: Options of the chat template.

        Raises:
            Error: The call failed.
        """
        request = requests.tokenize_request(prompt, model, options, add_special_tokens)
        return tuple((self._call(self._stub.Tokenize, request, timeout)).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        keep_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Return the text of tokens.

        Raises:
            Error: The call failed.
        """
        request = requests.detokenize_request(token_ids, model, keep_special_tokens)
        text: str = (self._call(self._stub.Detokenize, request, timeout)).text
        return text

    def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """Return the models that are served now, with their limits and load.

        Raises:
            Error: The call failed.
        """
        request = pb.ListModelsRequest()
        return responses.models(self._call(self._stub.ListModels, request, timeout))

    def is_serving(self, *, timeout: float | None = 5.0) -> bool:
        """Return whether the server is ready for requests; False if it cannot be reached."""
        request = health_pb2.HealthCheckRequest()
        try:
            response = self._call(self._health.Check, request, timeout)
        except Error:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Close the connection and cancel its calls."""
        self._channel.close()

    def _call(self, method: Any, request: Any, timeout: float | None) -> Any:  # noqa: ANN401
        try:
            return method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
