"""Conversion of responses to client types, for sync and asyncio."""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import fields

from octavo.client.types import (
    Accepted,
    Classes,
    Completion,
    Delta,
    Embeddings,
    Event,
    Finished,
    FinishReason,
    Loading,
    Model,
    Output,
    Scores,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from octavo.common.sampling_parameters import set_values
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import sampling_pb2

_REASONS = {
    sampling_pb2.FINISH_REASON_EOS: FinishReason.EOS,
    sampling_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    sampling_pb2.FINISH_REASON_STOP_STRING: FinishReason.STOP_STRING,
    sampling_pb2.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
    sampling_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}


def event(response: pb.GenerateResponse) -> Event | None:
    """Decode a response; return None for an event unknown to this client's version."""
    match response.WhichOneof("event"):
        case "loading":
            return Loading(response.loading.model, response.loading.queue_position)
        case "accepted":
            accepted = response.accepted
            return Accepted(
                accepted.request_id,
                accepted.model,
                accepted.prompt_tokens,
                accepted.cached_tokens,
                _logprobs(accepted.prompt_logprobs),
                tuple(accepted.prompt_token_ids),
                accepted.queue_position,
                tuple(accepted.unenforced),
            )
        case "delta":
            delta = response.delta
            return Delta(
                delta.index,
                delta.text,
                tuple(delta.token_ids),
                _logprobs(delta.logprobs),
                delta.reasoning,
                tuple(ToolCallDelta(c.index, c.arguments, c.id, c.name) for c in delta.tool_calls),
            )
        case "finished":
            return _finished(response.finished)
    return None


def models(response: pb.ListModelsResponse) -> tuple[Model, ...]:
    """Decode a ListModelsResponse."""
    return tuple(map(_model, response.models))


def embeddings(response: pb.EmbedResponse) -> "tuple[array[float], ...]":
    """Decode the embeddings of an EmbedResponse, 32-bit floats each."""
    return rows(response.embeddings, response.dimensions)


def rows(packed: bytes, columns: int) -> "tuple[array[float], ...]":
    """Decode little-endian 32-bit floats, `columns` of them in each row."""
    size = columns * 4
    made = []
    for start in range(0, len(packed), size):
        floats = array("f", packed[start : start + size])
        if sys.byteorder == "big":
            floats.byteswap()
        made.append(floats)
    return tuple(made)


def embedded(response: pb.EmbedResponse) -> Embeddings:
    """Decode an EmbedResponse."""
    counts = tuple(response.token_counts)
    return Embeddings(response.request_id, response.model, embeddings(response), counts)


def scored(response: pb.ScoreResponse) -> Scores:
    """Decode a ScoreResponse."""
    counts = tuple(response.token_counts)
    (scores,) = rows(response.scores, len(counts))
    return Scores(response.request_id, response.model, scores, counts)


def classified(response: pb.ClassifyResponse) -> Classes:
    """Decode a ClassifyResponse."""
    labels = tuple(response.labels)
    return Classes(
        response.request_id,
        response.model,
        labels,
        rows(response.scores, len(labels)),
        tuple(response.token_counts),
    )


def default_sampling(card: pb.ModelCard) -> dict[str, float]:
    """Return a model's default parameters, named as options of `generate`."""
    values = {
        name: value
        for name, parameter, value in set_values(card.default_sampling, "sampling")
        if parameter.generation_config
    }
    # Round to float32's seven digits: show 0.6, not 0.6000000238418579.
    return {n: v if isinstance(v, int) else float(f"{v:.7g}") for n, v in values.items()}


def tool_calls(pieces: Iterable[ToolCallDelta | pb.ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Assemble an output's tool calls, in order, from all their pieces."""
    calls: dict[int, list[ToolCallDelta | pb.ToolCallDelta]] = {}
    for piece in pieces:
        calls.setdefault(piece.index, []).append(piece)
    return tuple(
        ToolCall(one[0].id, one[0].name, "".join(piece.arguments for piece in one))
        for _, one in sorted(calls.items())
    )


class Gathering:
    """Collects a stream's events into a Completion."""

    def __init__(self) -> None:
        self.accepted: Accepted | None = None
        self.finished: dict[int, Finished] = {}
        self._deltas: dict[int, list[Delta]] = {}

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case Accepted():
                self.accepted = event
            case Delta():
                self._deltas.setdefault(event.index, []).append(event)
            case Finished():
                self.finished[event.index] = event

    def result(self) -> Completion:
        """Return the finished outputs; unfinished ones are omitted."""
        accepted = self.accepted or Accepted("", "", 0, 0)
        outputs = tuple(self._output(self.finished[index]) for index in sorted(self.finished))
        return Completion(
            accepted.request_id,
            accepted.model,
            outputs,
            accepted.prompt_logprobs,
            accepted.prompt_token_ids,
            accepted.unenforced,
        )

    def _output(self, end: Finished) -> Output:
        deltas = self._deltas.get(end.index, [])
        return Output(
            index=end.index,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
            reason=end.reason,
            usage=end.usage,
            stop_string=end.stop_string,
            stop_token_id=end.stop_token_id,
            score=end.score,
            reasoning="".join(delta.reasoning for delta in deltas),
            tool_calls=tool_calls(call for delta in deltas for call in delta.tool_calls),
            schema_errors=end.schema_errors,
        )


def state_name(card: pb.ModelCard) -> str:
    """Return a model's state, such as "loaded"."""
    state = card.state or pb.MODEL_STATE_LOADED
    known = state in pb.ModelState.values()
    return pb.ModelState.Name(state).removeprefix("MODEL_STATE_").lower() if known else ""


def _model(card: pb.ModelCard) -> Model:
    values = {field.name: getattr(card, field.name) for field in fields(Model)}
    values["warnings"] = tuple(card.warnings)
    values["kernels"] = tuple(card.kernels)
    values["aliases"] = tuple(card.aliases)
    values["prompt_names"] = tuple(card.prompt_names)
    values["labels"] = tuple(card.labels)
    values["default_sampling"] = default_sampling(card)
    values["state"] = state_name(card)
    if not card.HasField("default_max_tokens"):
        values["default_max_tokens"] = None
    return Model(**values)


def _finished(finished: pb.Finished) -> Finished:
    usage = {field.name: getattr(finished.usage, field.name) for field in fields(Usage)}
    return Finished(
        index=finished.index,
        reason=_REASONS.get(finished.reason, FinishReason.UNSPECIFIED),
        usage=Usage(**usage),
        stop_string=finished.stop_string or None,
        stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
        score=finished.score if finished.HasField("score") else None,
        schema_errors=tuple(finished.schema_errors),
    )


def _logprobs(logprobs: Iterable[sampling_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token.token_id,
            token.logprob,
            tuple(TopLogprob(top.token_id, top.logprob) for top in token.top),
        )
        for token in logprobs
    )
