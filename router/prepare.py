"""Makes requests of clients' messages: validates them, tokenizes prompts, plans the outputs."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from octavo.common import rpc
from octavo.common.limits import prompt_too_long
from octavo.router.call_tracker import Call
from octavo.router.engines.pool import EnginePool
from octavo.router.image_reader import ImageReader
from octavo.router.requests import validation
from octavo.router.requests.defaults import fill_in
from octavo.router.requests.held_schemas import held_schemas
from octavo.router.requests.output_plan import OutputFormats
from octavo.router.requests.parsers.formats import OutputPlan
from octavo.router.requests.placed_images import placed_images
from octavo.router.requests.request import Request
from octavo.router.requests.schema_checker import SchemaChecker
from octavo.router.settings import RouterSettings
from octavo.router.tenants.tenant import Tenant
from octavo.router.text.tokenization import Tokenizers
from octavo.v1 import generation_pb2

if TYPE_CHECKING:  # slow to import
    from octavo.router.images.processor import ProcessedImage

LARGE_BYTES = 32_768
"""Total bytes of schemas above which a thread parses them."""
TAIL_TOKENS = 256
"""Tokens at a prompt's end that are searched for markers of reasoning or an answer."""

T = TypeVar("T")


class Preparer:
    """Makes a request of each valid message.

    Args:
        settings: Names the parsers of outputs.
        pool: Knows the models.
        tokenizers: Run the pool's tokenizers.
        checker: Checks the schemas that outputs are checked against.
    """

    def __init__(
        self,
        settings: RouterSettings,
        pool: EnginePool,
        tokenizers: Tokenizers,
        checker: SchemaChecker,
    ) -> None:
        self._pool = pool
        self._tokenizers = tokenizers
        self._checker = checker
        self._reader = ImageReader(settings.allow_image_urls)
        self._formats = OutputFormats(settings.tool_parser, settings.reasoning_parser)

    async def prepare(self, message: generation_pb2.GenerateRequest, call: Call) -> Request:
        """Validate and tokenize.

        Raises:
            rpc.RpcError: The message is invalid.
        """
        model, tenant = call.model, call.usage.tenant
        if self._pool.embedding(model) is not None or self._pool.classifier(model) is not None:
            raise self._pool.other_purpose(model)
        limits, tokenizer = self._pool.limits(model), self._pool.tokenizer(model)
        images: list[ProcessedImage] = []
        sampling, max_tokens = self._pool.defaults(model)
        fill_in(message, sampling)
        validation.check_request(message, limits)
        if message.HasField("chat"):
            self._formats.check(message.chat, tokenizer.model)
        kept = validation.kept_tokens(message, limits)
        if kept is not None and (parts := validation.image_parts(message.chat)):
            raise rpc.invalid(parts[0][0], f"{parts[0][0]} excludes truncate_prompt_tokens")
        if message.WhichOneof("prompt") == "tokens":
            token_ids = list(message.tokens.token_ids)[-(kept or 0) :]
        else:
            images = await self.read_images(message.chat, model, tenant)
            token_ids = await self._tokenizers.encode(
                tokenizer,
                message,
                tenant,
                limits.max_model_len - 1,
                kept=kept,
                images=[image.text for image in images],
            )
            validation.check_vocabulary(message, token_ids, tokenizer.pieces, limits)
        plan = await self._plan(message, model, token_ids)
        if plan is not None and plan.checks is not None:
            await self._checker.check_schemas(plan.checks)
        adapter = self._pool.adapter(model)
        seeded = message.sampling.HasField("seed")
        return Request(
            request_id=call.request_id,
            model=model,
            tenant=tenant,
            message=message,
            prompt=token_ids,
            salt=tenant.salt(message.cache_salt),
            adapter="" if adapter is None else adapter.name,
            adapter_digest="" if adapter is None else adapter.digest,
            max_tokens=validation.output_length(message, len(token_ids), limits, max_tokens),
            arrival=call.arrival,
            deadline=call.deadline,
            seed=message.sampling.seed if seeded else secrets.randbits(64),
            plan=plan,
            bad_words=await self._tokenizers.encode_words(tokenizer, message.bad_words, tenant),
            images=placed_images(images, token_ids, tokenizer.images.image_token_id)
            if images and tokenizer.images is not None
            else (),
        )

    async def read_images(
        self, chat: generation_pb2.ChatPrompt, model: str, tenant: Tenant
    ) -> "list[ProcessedImage]":
        """Read the images of a chat, and drop their files from it.

        Raises:
            rpc.RpcError: The model reads none, or see `ImageReader.read`.
        """
        parts = validation.image_parts(chat)
        if not parts:
            return []
        field, processor = parts[0][0], self._pool.tokenizer(model).images
        limits = self._pool.limits(model)
        if processor is None or not limits.images:
            raise rpc.invalid(field, f"{field}: model {model!r} reads no images")
        images = []
        for field, part in parts:
            alone = len(parts) == 1
            images.append(await self._reader.read(field, part, processor, tenant, alone=alone))
            if sum(image.num_tokens for image in images) >= limits.max_model_len:
                raise prompt_too_long(limits.max_model_len - 1)
            part.Clear()  # of whole files, only the tensors are kept
        return images

    def close(self) -> None:
        """Stop the threads that read images."""
        self._reader.close()

    async def unenforced(self, message: generation_pb2.GenerateRequest) -> Sequence[str]:
        """Return the parts of its schemas that are not enforced; the request need not be valid."""
        return (await _planned(message, partial(held_schemas, message))).unenforced

    async def _plan(
        self, message: generation_pb2.GenerateRequest, model: str, token_ids: Sequence[int]
    ) -> OutputPlan | None:
        """Return how to parse and constrain outputs; None: plain text."""
        chat = message.HasField("chat")
        bounded = message.stop.HasField("max_reasoning_tokens")  # valid for chats only
        if not (chat or bounded or message.HasField("constraint")):
            return None
        tokenizer = self._pool.tokenizer(model)
        tail = tokenizer.decode(token_ids[-TAIL_TOKENS:], keep_special_tokens=True) if chat else ""
        plan = partial(
            self._formats.plan,
            message,
            tokenizer.model,
            tail,
            self._pool.eos_token_ids(model),
            self._pool.limits(model),
        )
        return await _planned(message, plan)


async def _planned(message: generation_pb2.GenerateRequest, plan: Callable[[], T]) -> T:
    """Parse a request's schemas, in a thread if they are large."""
    tools = sum(tool.ByteSize() for tool in message.chat.tools)
    large = message.constraint.ByteSize() + tools > LARGE_BYTES
    return await asyncio.to_thread(plan) if large else plan()
