"""GenerationService: the RPCs that clients call.

Write new RPCs here, and work that HTTP shares in `octavo.router.generate` or `octavo.router.embed`.
"""

from functools import partial

from octavo.common import rpc
from octavo.router.generate import Generator
from octavo.router.tenants.auth import caller
from octavo.v1 import generation_pb2, generation_pb2_grpc


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Map RPCs to `Generator`; the server's guard has authenticated the caller."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def Generate(  # type: ignore[override] # writes, yields nothing
        self, request: generation_pb2.GenerateRequest, context: rpc.Context
    ) -> None:
        """Generate outputs and stream them."""
        await self._generator.generate(
            request,
            partial(rpc.write, context),
            tenant=caller(),
            timeout=context.time_remaining(),
            metadata=context.invocation_metadata() or (),
            tell_waiting=True,
        )

    async def Embed(
        self, request: generation_pb2.EmbedRequest, context: rpc.Context
    ) -> generation_pb2.EmbedResponse:
        """Embed texts."""
        return await self._generator.embedder.embed(
            request,
            tenant=caller(),
            timeout=context.time_remaining(),
            metadata=context.invocation_metadata() or (),
        )

    async def Score(
        self, request: generation_pb2.ScoreRequest, context: rpc.Context
    ) -> generation_pb2.ScoreResponse:
        """Score documents."""
        return await self._generator.embedder.score(
            request,
            tenant=caller(),
            timeout=context.time_remaining(),
            metadata=context.invocation_metadata() or (),
        )

    async def Classify(
        self, request: generation_pb2.ClassifyRequest, context: rpc.Context
    ) -> generation_pb2.ClassifyResponse:
        """Score the classes of texts."""
        return await self._generator.embedder.classify(
            request,
            tenant=caller(),
            timeout=context.time_remaining(),
            metadata=context.invocation_metadata() or (),
        )

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: rpc.Context
    ) -> generation_pb2.TokenizeResponse:
        """Tokenize a text or a chat."""
        return await self._generator.tokenize(request, caller())

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: rpc.Context
    ) -> generation_pb2.DetokenizeResponse:
        """Detokenize token ids."""
        return await self._generator.detokenize(request, caller())

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: rpc.Context
    ) -> generation_pb2.ListModelsResponse:
        """List the models that the caller may use."""
        return self._generator.list_models(caller())
