"""Requests to any server with OpenAI's HTTP API: vLLM, Octavo's own HTTP port, and others."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import httpx2

from octavo.cli.bench.endpoint import RequestError, TokenMessage
from octavo.cli.bench.settings import openai_base_url
from octavo.cli.bench.workload import FIRST_TOKEN, BenchRequest, ServedModel
from octavo.cli.output import fail
from octavo.client import Message, Usage

CONNECT_SECONDS = 30.0
LOOKUP_SECONDS = 30.0

VOCABULARY = 30_000
"""Upper limit of token ids in random prompts, as the API does not tell the vocabulary size."""

OPTIONS: Mapping[str, Any] = {
    "temperature": 0,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
"""Greedy sampling that overrides models' defaults, with OpenAI's parameters only."""

CONNECTION_FAILED = "CONNECTION_FAILED"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
NO_USAGE = "NO_USAGE"
STREAM_BROKEN = "STREAM_BROKEN"
STREAM_ERROR = "STREAM_ERROR"

_TEXTS = ("content", "reasoning_content", "reasoning")
"""Parts of a chat's delta that hold generated text."""


@asynccontextmanager
async def connect(url: str, api_key: str | None) -> AsyncIterator["OpenAIEndpoint"]:
    """Yield the endpoint of a server's URL; close its connections at the end.

    The environment's proxies and passwords are ignored: proxies would be measured, and passwords
    would replace the key.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    client = httpx2.AsyncClient(
        headers=headers,
        trust_env=False,
        timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
    )
    async with client:
        yield OpenAIEndpoint(client, openai_base_url(url))


class OpenAIEndpoint:
    """A server with OpenAI's API. See `Endpoint`.

    Token and text prompts are sent to `/completions`, messages to `/chat/completions`.

    Args:
        client: HTTP client.
        url: URL before these paths.
    """

    def __init__(self, client: httpx2.AsyncClient, url: str) -> None:
        self._client = client
        self._url = url

    async def find_model(self, name: str | None) -> ServedModel:
        """Return the named model, else the first of `/models`.

        If the server has no `/models`, a named model is used unchecked.

        Raises:
            typer.Exit: No server answers, it refuses to list its models, or it does not have the
                model.
        """
        try:
            response = await self._client.get(f"{self._url}/models", timeout=LOOKUP_SECONDS)
        except httpx2.HTTPError as error:
            raise fail(
                f"nothing answers at {self._url}: {_text(error)}; start the server, or set --url"
            ) from None
        if response.status_code in {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED} and name:
            return ServedModel(name, None, VOCABULARY)
        if not response.is_success:
            refused = _refusal(response)
            hint = ""
            if response.status_code == HTTPStatus.UNAUTHORIZED:
                hint = "; set the API key in OCTAVO_API_KEY or with --api-key"
            elif response.status_code == HTTPStatus.NOT_FOUND:
                hint = "; set --model, or a --url with the API's path"
            raise fail(f"{self._url}/models: {refused.code}: {refused.message}{hint}")
        models = _listed(response)
        if models is None:
            raise fail(f"{self._url}/models is not a list of models in OpenAI's form")
        for model in models:
            if name in (None, model.name):
                return model
        served = ", ".join(model.name for model in models) or "none"
        raise fail(f"no model {name!r}; served: {served}" if name else "no model is served yet")

    async def stream(
        self, request: BenchRequest, *, model: str, salt: str, timeout: float | None
    ) -> AsyncIterator[TokenMessage | Usage]:
        """Send a request; yield each message with text, then the server's usage.

        Args:
            request: The prompt, and the number of tokens to generate.
            model: Name of the model.
            salt: Seed of the first token of a token prompt, so that prompts with different salts
                share no prefix; other prompts are unchanged.
            timeout: Deadline in seconds.

        Raises:
            RequestError: The request failed. The code is the HTTP status and its name, or one of
                CONNECTION_FAILED, DEADLINE_EXCEEDED, STREAM_ERROR (the server sent an error in the
                stream), STREAM_BROKEN (the stream is truncated or invalid), or NO_USAGE (the server
                did not count tokens).
        """
        path, body = _body(request, model, salt)
        try:
            async with asyncio.timeout(timeout):
                async for event in self._events(path, body):
                    yield event
        except TimeoutError:
            raise RequestError(DEADLINE_EXCEEDED, f"no answer within {timeout:g} s") from None

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[TokenMessage | Usage]:
        """Yield one request's messages and usage."""
        opened, ended, usage = False, False, None
        try:
            async with self._client.stream("POST", f"{self._url}/{path}", json=body) as response:
                opened = True
                if not response.is_success:
                    await response.aread()
                    raise _refusal(response)
                async for event in httpx2.EventSource(response):
                    if event.data == "[DONE]":
                        ended = True
                        break
                    chunk = _parse(event.data)
                    if _has_text(chunk):
                        yield TokenMessage(None)
                    usage = _usage(chunk) or usage
        except httpx2.HTTPError as error:
            code = STREAM_BROKEN if opened else CONNECTION_FAILED
            raise RequestError(code, _text(error)) from None
        if not ended:
            raise RequestError(STREAM_BROKEN, "the stream ended without [DONE]")
        if usage is None:
            raise RequestError(
                NO_USAGE, "the server sent no usage, so its tokens cannot be counted"
            )
        yield usage


def _body(request: BenchRequest, model: str, salt: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the JSON body of a request."""
    body = {**OPTIONS, "model": model, "max_tokens": request.max_tokens}
    if request.ignore_eos:
        body["ignore_eos"] = True  # not in OpenAI's API; --stop-at-eos omits it
    prompt = request.prompt
    if isinstance(prompt, str):
        return "completions", {**body, "prompt": prompt}
    if isinstance(prompt[0], Message):
        messages = [
            {"role": turn.role, "content": turn.content}
            for turn in prompt
            if isinstance(turn, Message)
        ]
        return "chat/completions", {**body, "messages": messages}
    first = FIRST_TOKEN + int(salt, 16) % (VOCABULARY - FIRST_TOKEN)
    return "completions", {**body, "prompt": [first, *prompt[1:]]}


def _parse(data: str) -> dict[str, Any]:
    """Decode an event's JSON object.

    Raises:
        RequestError: The event is an error, or not a JSON object.
    """
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise RequestError(STREAM_BROKEN, f"an event is not a JSON object: {data[:100]!r}")
    if chunk.get("error"):
        raise RequestError(STREAM_ERROR, _message(chunk) or data[:300])
    return chunk


def _has_text(chunk: Mapping[str, Any]) -> bool:
    """Return whether a chunk of either API contains generated text."""
    for choice in chunk.get("choices") or ():
        if choice.get("text"):
            return True
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in _TEXTS):
            return True
    return False


def _usage(chunk: Mapping[str, Any]) -> Usage | None:
    """Return the usage in a chunk, if any."""
    usage = chunk.get("usage")
    if not usage or "completion_tokens" not in usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
        output_tokens=usage["completion_tokens"] or 0,
    )


def _listed(response: httpx2.Response) -> list[ServedModel] | None:
    """Return the models in a response; None if it does not have the API's form."""
    try:
        cards = response.json()["data"]
        return [
            ServedModel(str(card["id"]), card.get("max_model_len") or None, VOCABULARY)
            for card in cards
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _refusal(response: httpx2.Response) -> RequestError:
    """Return the error for a status other than 2xx; the body was read."""
    try:
        name = HTTPStatus(response.status_code).name
    except ValueError:
        name = response.reason_phrase
    try:
        server_message = _message(response.json())
    except ValueError:
        server_message = None
    message = server_message or response.text.strip()[:300] or response.reason_phrase
    if (seconds := response.headers.get("Retry-After")) is not None:
        message += f" (Retry-After: {seconds})"
    return RequestError(f"{response.status_code} {name}", message)


def _message(body: object) -> str | None:
    """Return the message of an error in OpenAI's, vLLM's or FastAPI's JSON, if it is one."""
    if not isinstance(body, dict):
        return None
    error = body.get("error", body)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail")
    return str(error) if error else None


def _text(error: Exception) -> str:
    """Return an error's message, or its type if it has none."""
    return str(error) or type(error).__name__
