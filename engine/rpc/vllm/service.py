"""VllmEngine: the RPCs of a vLLM engine, over the core that EngineService serves."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc
import structlog
from google.protobuf.json_format import MessageToDict
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb2
from tokenizers import Tokenizer

from octavo.common import rpc
from octavo.common.background import call_in_thread
from octavo.common.models.json_files import CONFIG, read_json
from octavo.common.tracing import CONTEXT_FIELDS
from octavo.common.version import own_version
from octavo.engine.constraints.constraint import ConstraintKind
from octavo.engine.metrics import EngineMetrics, usage_ratio, used_blocks
from octavo.engine.rpc.served_engine import ServedEngine
from octavo.engine.rpc.service import RETRY_SECONDS
from octavo.engine.rpc.validation import to_request
from octavo.engine.rpc.vllm.kv_events import KvSubscription
from octavo.engine.rpc.vllm.stop_strings import StopStrings
from octavo.engine.rpc.vllm.streams import GenerateStreams, MakeStopStrings
from octavo.engine.rpc.vllm.tokenizer_archive import in_chunks, tokenizer_archive
from octavo.engine.rpc.vllm.translation import to_submit
from octavo.engine.settings import EngineSettings

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

SERVER_TYPE = "vllm-grpc"
"""Name of vLLM's contract, as gateways expect it."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """State that exists once the model is loaded.

    Attributes:
        engine: The engine.
        session: Number of the core session that all Generate calls share.
        streams: The running Generate calls.
    """

    engine: ServedEngine
    session: int
    streams: GenerateStreams


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves a core to gateways that know vLLM's contract; UNAVAILABLE until `attach`."""

    def __init__(self, settings: EngineSettings, metrics: EngineMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._loaded: _Loaded | None = None
        self._created = time.monotonic()
        self._received = 0.0
        self._tokenizer: Tokenizer | None = None
        self._archive: bytes | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    def attach(self, engine: ServedEngine) -> None:
        """Begin to serve: the model is loaded."""
        engine.parts.scheduler.cache.prefixes.contents = {}
        streams = GenerateStreams(engine.core)
        self._loaded = _Loaded(engine, engine.sessions.attach(streams), streams)

    def _engine(self) -> _Loaded:
        """Return the loaded engine.

        Raises:
            RpcError: UNAVAILABLE while the model is being loaded.
        """
        if self._loaded is None:
            raise rpc.unavailable("the engine is loading its model; try again", RETRY_SECONDS)
        return self._loaded

    async def Generate(
        self, request: vllm_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[vllm_pb2.GenerateResponse]:
        """Run a request; if the caller leaves, it is aborted."""
        loaded, self._received = self._engine(), time.time()
        limits = loaded.engine.parts.limits
        metadata = dict(context.invocation_metadata() or ())
        trace_context = {key: str(metadata[key]) for key in CONTEXT_FIELDS if key in metadata}
        checked = to_request(
            to_submit(request, limits, trace_context),
            session=loaded.session,
            limits=limits,
            eos_token_ids=loaded.engine.parts.eos_token_ids,
        )
        if checked.constraint is not None and request.sampling_params.HasField("grammar"):
            grammar = replace(checked.constraint, kind=ConstraintKind.EBNF)
            checked = replace(checked, constraint=grammar)
        responses: Any = loaded.streams.run(
            checked,
            streaming=request.stream,
            stop_strings=await self._stop_strings(request.sampling_params),
        )
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def _stop_strings(self, params: vllm_pb2.SamplingParams) -> MakeStopStrings | None:
        """Return a factory of `StopStrings`, one per output; None without stop strings.

        Raises:
            RpcError: UNIMPLEMENTED: the engine has no tokenizer to look for them.
        """
        if not params.stop:
            return None
        read_tokens = self._engine().engine.parts.read_tokens
        if read_tokens is None:
            why = (
                "sampling_params.stop must be empty: the engine does not have the model's tokenizer"
            )
            raise rpc.unimplemented("sampling_params.stop", why)
        if self._tokenizer is None:
            table = await call_in_thread(read_tokens)
            self._tokenizer = await call_in_thread(Tokenizer.from_str, table.json)
        return partial(StopStrings, self._tokenizer, params.stop, params.min_tokens)

    async def Abort(
        self, request: vllm_pb2.AbortRequest, context: Context
    ) -> vllm_pb2.AbortResponse:
        """Abort requests by their ids."""
        self._engine().streams.abort(request.request_ids)
        return vllm_pb2.AbortResponse()

    async def Embed(
        self, request: vllm_pb2.EmbedRequest, context: Context
    ) -> vllm_pb2.EmbedResponse:
        """Refuse: the engine only generates."""
        raise rpc.unimplemented("tokenized", "this engine generates text and makes no embeddings")

    async def HealthCheck(
        self, request: vllm_pb2.HealthCheckRequest, context: Context
    ) -> vllm_pb2.HealthCheckResponse:
        """Return whether requests are accepted."""
        if self._loaded is None:
            return vllm_pb2.HealthCheckResponse(healthy=False, message="loading the model")
        if self._loaded.engine.core.load.draining:
            return vllm_pb2.HealthCheckResponse(healthy=False, message="draining")
        return vllm_pb2.HealthCheckResponse(healthy=True, message="serving")

    async def GetModelInfo(
        self, request: vllm_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_pb2.GetModelInfoResponse:
        """Return the model's description."""
        parts, settings = self._engine().engine.parts, self._settings
        config = read_json(parts.path / CONFIG)
        defaults = MessageToDict(parts.defaults.sampling, preserving_proto_field_name=True)
        return vllm_pb2.GetModelInfoResponse(
            model_path=str(parts.path),
            tokenizer_path=str(parts.path),
            served_model_name=settings.model_name,
            is_generation=True,
            max_context_length=parts.limits.max_model_len,
            max_req_input_len=parts.limits.max_model_len - 1,
            vocab_size=parts.limits.vocab_size,
            model_type=str(config.get("model_type", "")),
            architectures=config.get("architectures") or (),
            eos_token_ids=parts.eos_token_ids,
            pad_token_id=_token_id(config.get("pad_token_id")),
            bos_token_id=_token_id(config.get("bos_token_id")),
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    async def GetServerInfo(
        self, request: vllm_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_pb2.GetServerInfoResponse:
        """Return the engine's description."""
        loaded = self._engine()
        load, (budget,) = loaded.engine.core.load, loaded.engine.parts.limits.budgets
        return vllm_pb2.GetServerInfoResponse(
            active_requests=load.running + load.waiting + load.swapped,
            last_receive_timestamp=self._received,
            uptime_seconds=time.monotonic() - self._created,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            kv_cache_dtype=self._settings.kv_cache_dtype,
            block_size=budget.block_size,
            attention_backend=loaded.engine.parts.kernels,
            model_dtype=f"torch.{loaded.engine.parts.dtype}",
            max_num_seqs=loaded.engine.parts.max_num_seqs,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(
        self, request: vllm_pb2.GetLoadsRequest, context: Context
    ) -> vllm_pb2.GetLoadsResponse:
        """Return the load of the only rank."""
        loaded = self._engine()
        load, (budget,) = loaded.engine.core.load, loaded.engine.parts.limits.budgets
        size = budget.block_size
        running, most = load.running, loaded.engine.parts.max_num_seqs
        scheduler_load = vllm_pb2.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=load.waiting + load.swapped,
            num_total_reqs=running + load.waiting + load.swapped,
            num_used_tokens=used_blocks(load) * size - load.wasted_slots,
            max_total_num_tokens=load.total_blocks * size,
            token_usage=usage_ratio(load),
            # A running request gets a token in each step.
            gen_throughput=running / load.step_seconds if load.step_seconds else 0.0,
            cache_hit_rate=self._metrics.prefix_hit_rate,
            utilization=running / most,
            max_running_requests=most,
            num_waiting_uncached_tokens=loaded.streams.waiting_tokens,
        )
        return vllm_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=own_version(),
            dp_rank_count=1,
            loads=[scheduler_load],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Send the tokenizer's files as a zip archive."""
        if self._archive is None:
            self._archive = await call_in_thread(
                tokenizer_archive, self._engine().engine.parts.path
            )
        for chunk in in_chunks(self._archive):
            yield chunk

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Send the prefix cache's contents, then its changes."""
        engine = self._engine().engine
        if not self._settings.enable_prefix_caching:
            raise rpc.unimplemented(
                "start_sequence_number", "the engine runs with --no-enable-prefix-caching"
            )
        if request.start_sequence_number:
            raise rpc.RpcError(
                grpc.StatusCode.OUT_OF_RANGE,
                "start_sequence_number must be 0: no events are kept, and 0 gets a snapshot",
                field="start_sequence_number",
            )
        subscription = KvSubscription()
        session = engine.sessions.attach(subscription)
        try:
            engine.core.open_session(session)
            async for batch in subscription.batches():
                yield batch
        finally:
            engine.sessions.detach(session)


def _token_id(value: object) -> int:
    """Return a token id of a config, which may have none or several; 0 for none, as in proto3."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) else 0
