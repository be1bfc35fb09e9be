"""A loaded engine that embeds or classifies texts: its core, and the sessions of routers."""

import asyncio
import uuid
from itertools import accumulate, pairwise
from operator import gt
from typing import Any

import numpy as np
import structlog

from octavo.common import rpc
from octavo.common.limits import check_token_ids
from octavo.common.models.embedding import EmbeddingPlan
from octavo.engine.embedding.core import Embedding, EmbeddingCore, RefusedError
from octavo.engine.metrics import EngineMetrics
from octavo.engine.rpc.engine_info import engine_info, show_info
from octavo.engine.rpc.session import Session
from octavo.engine.rpc.sessions import Sessions
from octavo.engine.rpc.thread_bridge import thread_bridge
from octavo.engine.scheduling.request import Request
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build_embedder import BLOCK_TOKENS, EmbedderParts
from octavo.v1 import engine_pb2

log = structlog.get_logger(__name__)

RETRY_SECONDS = 1.0
"""Seconds until a full queue may have room."""


class ServedEmbedder:
    """One core that embeds or classifies, and the sessions that its load goes to.

    Attributes:
        parts: The engine's parts.
        sessions: The sessions of routers.
        core: The core; it serves while its `run` runs in a thread.
    """

    def __init__(
        self, settings: EngineSettings, parts: EmbedderParts, metrics: EngineMetrics
    ) -> None:
        self.parts = parts
        self.sessions = Sessions()
        self._info = engine_info(settings, parts, uuid.uuid4().hex)
        metrics.sessions.set_function(lambda: self.sessions.of_routers)
        show_info(metrics, self._info)
        loop = asyncio.get_running_loop()
        self.core = EmbeddingCore(
            parts.encoder,
            metrics,
            thread_bridge(loop, self.sessions.add_events, self.sessions.fail),
            capacity=parts.blocks,
            max_tokens=parts.max_num_batched_tokens,
            max_waiting=settings.max_waiting,
            max_failed_steps=settings.max_failed_steps,
        )

    async def embed(
        self, request: engine_pb2.EngineServiceEmbedRequest
    ) -> engine_pb2.EngineServiceEmbedResponse:
        """Embed or classify texts; a cancelled call ends the request.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT; UNAVAILABLE while the engine drains;
                RESOURCE_EXHAUSTED if its queue is full; INTERNAL if a step failed.
        """
        embedding = Embedding(self._texts(request), self._dimensions(request), raw=request.raw)
        try:
            self.core.add(embedding)
            embeddings = await asyncio.wrap_future(embedding.result)
        except RefusedError as error:
            if error.draining:
                raise rpc.unavailable(str(error)) from None
            raise rpc.exhausted(str(error), RETRY_SECONDS) from None
        return engine_pb2.EngineServiceEmbedResponse(embeddings=embeddings)

    def _texts(
        self, request: engine_pb2.EngineServiceEmbedRequest
    ) -> list[np.ndarray[tuple[int], np.dtype[np.uint32]]]:
        """Return the texts of a valid request.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT.
        """
        most, lengths = self.parts.encoder.max_tokens, request.lengths
        if not lengths or sum(lengths) != len(request.token_ids):
            raise rpc.invalid(
                "lengths",
                f"lengths must be those of one text or more, with {len(request.token_ids)} tokens"
                f" together; they are of {sum(lengths)}",
            )
        if min(lengths) < 1 or max(lengths) > most:
            raise rpc.invalid(
                "lengths",
                f"lengths must be in [1, {most}]; got {min(lengths)} to {max(lengths)}",
                reason=rpc.CONTEXT_LENGTH_EXCEEDED,
            )
        check_token_ids("token_ids", request.token_ids, self.parts.vocab_size)
        tokens = np.array(request.token_ids, dtype=np.uint32)
        texts = [tokens[first:last] for first, last in pairwise([0, *accumulate(lengths)])]
        seconds = request.second_lengths
        if seconds and (len(seconds) != len(lengths) or any(map(gt, seconds, lengths))):
            raise rpc.invalid(
                "second_lengths",
                f"second_lengths must have {len(lengths)} entries, none more than a text has",
            )
        if (segments := self.parts.encoder.segments) is not None:
            for text, second in zip(texts, seconds, strict=False):
                text[len(text) - second :] += segments
        return texts

    def _dimensions(self, request: engine_pb2.EngineServiceEmbedRequest) -> int | None:
        if not request.HasField("dimensions"):
            return None
        if not isinstance(self.parts.encoder.plan, EmbeddingPlan):
            raise rpc.invalid("dimensions", "dimensions are those of embeddings: it has classes")
        most = self.parts.encoder.dimensions
        if not 1 <= request.dimensions <= most:
            raise rpc.invalid(
                "dimensions", f"dimensions must be in [1, {most}]; got {request.dimensions}"
            )
        return request.dimensions

    def new_session(self) -> Session:
        """Return a session of a router, which carries the load alone."""
        return Session(self.core, _refuse)

    def info(self) -> engine_pb2.GetEngineInfoResponse:
        """Return the engine's description and load."""
        info = engine_pb2.GetEngineInfoResponse(
            vocab_size=self.parts.vocab_size,
            max_model_len=self.parts.encoder.max_tokens,
            max_outputs=1,
            block_size=BLOCK_TOKENS,
            load=self.core.load,
            **self._purpose(),
        )
        info.MergeFrom(self._info)
        return info

    def _purpose(self) -> dict[str, Any]:
        """Return the fields of `info` that say what the model makes of texts."""
        plan = self.parts.encoder.plan
        if not isinstance(plan, EmbeddingPlan):
            info = engine_pb2.ClassifierInfo(labels=plan.labels, prompt=plan.prompt)
            if plan.answers is not None:
                info.pair_chat.add_generation_prompt = plan.opens_answer
            return {"classifier": info}
        return {
            "embedding": engine_pb2.EmbeddingInfo(
                dimensions=self.parts.encoder.dimensions,
                fewer_dimensions=plan.dimensions,
                any_dimensions=plan.any_dimensions,
                prompts=plan.prompts,
                default_prompt_name=plan.default_prompt,
                similarity=plan.similarity,
            )
        }


def _refuse(*_: object, **__: object) -> Request:
    """Refuse a request to generate.

    Raises:
        rpc.RpcError: UNIMPLEMENTED.
    """
    raise rpc.unimplemented(
        "model", "the engine is for texts as a whole, and does not generate any"
    )
