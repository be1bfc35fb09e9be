"""The asyncio client: `Client` with await."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from octavo.client import requests, responses
from octavo.client.core import BaseClient, BaseStream
from octavo.client.errors import CancelledError, Error, from_rpc_error
from octavo.client.prompts import Prompt
from octavo.client.structured import T, constrained, instance
from octavo.client.types import Classes, Completion, Delta, Embeddings, Event, Model, Scores
from octavo.common.sampling_parameters import ChatOptions, GenerateOptions
from octavo.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class AsyncStream(BaseStream):
    """The response stream of one request; see `Stream`.

    After `break`, the event loop cancels the request when it next runs; `async with` and `close()`
    cancel it at once.
    """

    def __init__(self, call: "Call") -> None:
        super().__init__(call)
        self._call = call

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield every event.

        Raises:
            Error: The request failed.
        """
        try:
            async for response in self._call:
                if (event := self._decode(response)) is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # `close` cancelled the call, not this task.
            raise CancelledError(grpc.StatusCode.CANCELLED, "the stream was closed") from None
        finally:
            self.close()

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        """Yield the pieces of text."""
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield event

    async def complete(self) -> Completion:
        """Wait for the end; return the whole result.

        Raises:
            Error: The request failed.
        """
        async for _ in self.events():
            pass
        return self._gathering.result()

    async def text(self) -> str:
        """Wait for the end; return the first output's text.

        Raises:
            Error: The request failed.
        """
        return (await self.complete()).text

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class AsyncClient(BaseClient[AsyncStream]):
    """A client of an Octavo router for one event loop; create it inside the loop.

    See `BaseClient` for the arguments.
    """

    _insecure_channel = staticmethod(grpc.aio.insecure_channel)
    _secure_channel = staticmethod(grpc.aio.secure_channel)
    _make_stream = AsyncStream

    @overload
    async def complete(
        self,
        prompt: Prompt,
        *,
        schema: None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion: ...

    @overload
    async def complete(
        self,
        prompt: Prompt,
        *,
        schema: type[T],
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> T: ...

    async def complete(
        self,
        prompt: Prompt,
        *,
        schema: type[T] | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion | T:
        """Return the whole result, or an instance of `schema`; see `Client.complete`.

        Raises:
            OutputError: The output was truncated, or a validator of `schema` rejects it.
            Error: The request failed.
        """
        stream = self.generate(prompt, timeout=timeout, **constrained(options, schema))
        return instance(await stream.complete(), schema)

    async def embed(
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
        return responses.embedded(await self._call(self._stub.Embed, request, timeout))

    async def score(
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
        return responses.scored(await self._call(self._stub.Score, request, timeout))

    async def classify(
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
        return responses.classified(await self._call(self._stub.Classify, request, timeout))

    async def tokenize(
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
        return tuple((await self._call(self._stub.Tokenize, request, timeout)).token_ids)

    async def detokenize(
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
        text: str = (await self._call(self._stub.Detokenize, request, timeout)).text
        return text

    async def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """Return the models that are served now, with their limits and load.

        Raises:
            Error: The call failed.
        """
        request = pb.ListModelsRequest()
        return responses.models(await self._call(self._stub.ListModels, request, timeout))

    async def is_serving(self, *, timeout: float | None = 5.0) -> bool:
        """Return whether the server is ready for requests; False if it cannot be reached."""
        request = health_pb2.HealthCheckRequest()
        try:
            response = await self._call(self._health.Check, request, timeout)
        except Error:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Close the connection and cancel its calls."""
        await self._channel.close()

    async def _call(self, method: Any, request: Any, timeout: float | None) -> Any:  # noqa: ANN401
        try:
            return await method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
