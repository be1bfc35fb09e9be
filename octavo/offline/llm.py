"""`octavo.LLM`: many prompts through a model, without a server of one's own."""

import asyncio
import itertools
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Self, TypeVar, Unpack, overload

from octavo.client import (
    AsyncClient,
    Completion,
    Embeddings,
    GenerateOptions,
    Message,
    ResourceExhaustedError,
    UnavailableError,
)
from octavo.client.prompts import Prompt
from octavo.client.requests import EmbedOptions
from octavo.common.background import start_in_loop, start_thread
from octavo.offline.in_order import in_order
from octavo.offline.progress import Progress
from octavo.offline.server import START_SECONDS, ChildServer, FlagValue, command_line

IN_FLIGHT = 128
"""Default maximum of requests at once; the engine batches as many as its cache holds."""
TEXTS = 64
"""Texts in a request for embeddings."""

T = TypeVar("T")
Request = Callable[[AsyncClient], Awaitable[T]]


class LLM:
    """A model for programs: `octavo serve` in child processes, or routers that run elsewhere.

        with octavo.LLM("demo") as llm:
            for completion in llm.chat(["Why is the sky blue?", "Name a river."], max_tokens=100):
                print(completion.text)

    Results are in the order of the prompts. A sequence of prompts gives a list; any other iterable
    gives an iterator, which takes prompts as results are read, in bounded memory. Threads may
    share this object. The server ends with `close`, and with this process.

    Args:
        model: A Hub name, a directory, a GGUF file or `demo`; with `hosts`, a served model's name.
        hosts: Addresses of running routers to use in turn, instead of a server here.
        in_flight: Maximum number of requests at once.
        progress: Whether to show progress, if standard error is a terminal.
        start_timeout: Maximum seconds until the model is ready.
        **flags: Flags of `octavo serve`, such as `quantization="int8"` or `num_blocks=512`.

    Raises:
        ServerError: The server did not start; the message has the end of its log.
        ValueError: There is neither a model nor a host, flags come with hosts, or no request may be
            in flight.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        hosts: Sequence[str] = (),
        in_flight: int = IN_FLIGHT,
        progress: bool = True,
        start_timeout: float = START_SECONDS,
        **flags: FlagValue,
    ) -> None:
        if hosts and flags:
            raise ValueError(f"with hosts, no server starts here that takes {', '.join(flags)}")
        if not hosts and model is None:
            raise ValueError("give a model, or hosts that serve one")
        if in_flight < 1:
            raise ValueError(f"in_flight must be at least 1 (given: {in_flight})")
        self._server = None
        self._model = model
        if model is not None and not hosts:
            self._server = ChildServer(model, command_line(flags), start_timeout)
            self._model, hosts = None, [self._server.address]
        self._in_flight = in_flight
        self._progress = progress
        self._loop = asyncio.new_event_loop()
        self._thread = start_thread(self._loop.run_forever, "llm")
        self._clients = start_in_loop(self._loop, _connect(hosts)).result()
        self._turns = itertools.cycle(self._clients)
        self._places = asyncio.Semaphore(in_flight)

    @overload
    def generate(  # type: ignore[overload-overlap] # the first that fits
        self, prompts: str | Sequence[Prompt], **options: Unpack[GenerateOptions]
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompts: Iterable[Prompt], **options: Unpack[GenerateOptions]
    ) -> Iterator[Completion]: ...

    def generate(
        self, prompts: Iterable[Prompt], **options: Unpack[GenerateOptions]
    ) -> list[Completion] | Iterator[Completion]:
        """Return the completion of each prompt.

        Args:
            prompts: Texts, chats or lists of token ids; or one text.
            **options: See GenerateOptions.

        Raises:
            Error: A request failed; the others are cancelled.
            ServerError: The server has ended.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if isinstance(prompts, Sequence):
            return list(self._complete(prompts, options, len(prompts)))
        return self._complete(prompts, options, None)

    @overload
    def chat(  # type: ignore[overload-overlap] # the first that fits
        self, conversations: str | Sequence[Prompt], **options: Unpack[GenerateOptions]
    ) -> list[Completion]: ...

    @overload
    def chat(
        self, conversations: Iterable[Prompt], **options: Unpack[GenerateOptions]
    ) -> Iterator[Completion]: ...

    def chat(
        self, conversations: Iterable[Prompt], **options: Unpack[GenerateOptions]
    ) -> list[Completion] | Iterator[Completion]:
        """Return the answer to each conversation; a text is a user's message.

        Arguments, results and errors are otherwise those of `generate`.
        """
        if isinstance(conversations, str):
            conversations = [conversations]
        prompts = map(_conversation, conversations)
        if isinstance(conversations, Sequence):
            return list(self._complete(prompts, options, len(conversations)))
        return self._complete(prompts, options, None)

    @overload
    def embed(  # type: ignore[overload-overlap] # the first that fits
        self, texts: Sequence[str], **options: Unpack[EmbedOptions]
    ) -> list["array[float]"]: ...

    @overload
    def embed(
        self, texts: Iterable[str], **options: Unpack[EmbedOptions]
    ) -> Iterator["array[float]"]: ...

    def embed(
        self, texts: Iterable[str], **options: Unpack[EmbedOptions]
    ) -> list["array[float]"] | Iterator["array[float]"]:
        """Return the embedding of each text, as 32-bit floats; or of one text.

        Arguments, results and errors are otherwise those of `AsyncClient.embed`.
        """
        if isinstance(texts, str):
            texts = [texts]
        if self._model is not None:
            options = {"model": self._model, **options}

        def request(batch: list[str], client: AsyncClient) -> Awaitable[Embeddings]:
            return client.embed(batch, **options)

        def count(result: Embeddings) -> tuple[int, int, int]:
            return len(result.embeddings), sum(result.token_counts), 0

        requests = (partial(request, batch) for batch in _batches(texts))
        total = len(texts) if isinstance(texts, Sequence) else None
        results = self._results(requests, total, count)
        embeddings = (each for result in results for each in result.embeddings)
        return list(embeddings) if isinstance(texts, Sequence) else embeddings

    def close(self) -> None:
        """Cancel requests, and stop the server."""
        if self._loop.is_closed():
            return
        start_in_loop(self._loop, self._disconnect()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _complete(
        self, prompts: Iterable[Prompt], options: GenerateOptions, total: int | None
    ) -> Iterator[Completion]:
        if self._model is not None:
            options = {"model": self._model, **options}

        def request(prompt: Prompt, client: AsyncClient) -> Awaitable[Completion]:
            return client.generate(prompt, **options).complete()

        def count(completion: Completion) -> tuple[int, int, int]:
            usages = [output.usage for output in completion.outputs]
            prompt_tokens = max((usage.prompt_tokens for usage in usages), default=0)
            return 1, prompt_tokens, sum(usage.output_tokens for usage in usages)

        return self._results((partial(request, prompt) for prompt in prompts), total, count)

    def _results(
        self,
        requests: Iterable[Request[T]],
        total: int | None,
        count: Callable[[T], tuple[int, int, int]],
    ) -> Iterator[T]:
        """Yield results in order; requests are taken as `in_order` says.

        Args:
            requests: Functions that send a request by a client.
            total: Number of results; None if unknown.
            count: Gives a result's arguments of `Progress.add`.
        """
        started = (start_in_loop(self._loop, self._send(request)) for request in requests)
        with (
            Progress(total, shown=self._progress) as progress,
            closing(in_order(started, self._in_flight)) as futures,
        ):
            for future in futures:
                result = self._result(future)
                progress.add(*count(result))
                yield result

    def _result(self, future: Future[T]) -> T:
        try:
            return future.result()
        except UnavailableError as error:
            raise (self._server.explain(error) if self._server else error) from error

    async def _send(self, request: Request[T]) -> T:
        async with self._places:
            client = next(self._turns)
            while True:
                try:
                    return await request(client)
                except ResourceExhaustedError as error:
                    if error.retry_after is None:
                        raise
                    await asyncio.sleep(error.retry_after)

    async def _disconnect(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients))


def _conversation(prompt: Prompt) -> Prompt:
    return [Message("user", prompt)] if isinstance(prompt, str) else prompt


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while batch := list(itertools.islice(iterator, TEXTS)):
        yield batch


async def _connect(hosts: Sequence[str]) -> list[AsyncClient]:
    return [AsyncClient(host) for host in hosts]
