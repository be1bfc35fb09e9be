"""A client's request: validated, tokenized, immutable."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.common.kv_cache.prefix_hash import (
    ImageSpan,
    prefix_salt,
    reusable_keys,
    short_key,
)
from octavo.common.priority import effective_arrival
from octavo.router.requests.held_schemas import HeldSchemas
from octavo.router.requests.parsers.formats import OutputPlan
from octavo.router.requests.validation import num_outputs
from octavo.router.tenants.tenant import Tenant
from octavo.v1 import engine_pb2, generation_pb2, sampling_pb2

if TYPE_CHECKING:  # slow to import
    from octavo.router.images.processor import ProcessedImage


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Request:
    """A valid, tokenized request, immutable. `RequestState` holds its progress.

    Attributes:
        request_id: Id in responses, logs and traces.
        model: Resolved model name.
        tenant: The caller.
        message: The client's message, with the model's defaults filled in.
        prompt: The prompt's tokens.
        salt: Text that keeps the prompt's cached blocks apart from those of other salts.
        max_tokens: Maximum tokens per output.
        arrival: Monotonic time of arrival, in seconds.
        deadline: Monotonic time of the client's deadline; None: no deadline.
        plan: How to parse and constrain outputs; None: plain text.
        seed: The client's seed or a random one, so that another engine samples the same tokens.
        adapter: The LoRA adapter that `model` names; empty for a base model.
        adapter_digest: Digest of the adapter, which is part of the keys of cached blocks.
        bad_words: Sequences of tokens that outputs must not contain.
        images: The prompt's images, in order, each with the tokens that stand for it.
    """

    request_id: str
    model: str
    tenant: Tenant
    message: generation_pb2.GenerateRequest
    prompt: Sequence[int]
    max_tokens: int
    arrival: float
    deadline: float | None = None
    seed: int = 0
    plan: OutputPlan | None = None
    salt: str = ""
    adapter: str = ""
    adapter_digest: str = ""
    bad_words: Sequence[Sequence[int]] = ()
    images: "Sequence[tuple[ImageSpan, ProcessedImage]]" = ()
    _keys: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_outputs(self) -> int:
        """Number of outputs."""
        return num_outputs(self.message)

    @property
    def checks(self) -> HeldSchemas | None:
        """Schemas to check at an output's end, if any."""
        return None if self.plan is None else self.plan.checks

    @property
    def constraint(self) -> sampling_pb2.OutputConstraint | None:
        """Constraint on whole outputs, for engines, if any."""
        return None if self.plan is None else self.plan.constraint

    def keys(self, block_size: int) -> list[int]:
        """Return the keys, as engines publish them, of the prompt's blocks that can be cached."""
        if block_size not in self._keys:
            spans = [span for span, _ in self.images]
            salt = prefix_salt(self.salt, self.adapter_digest, spans)
            keys = reusable_keys(self.prompt, block_size, salt)
            self._keys[block_size] = [short_key(key) for key in keys]
        return self._keys[block_size]

    @property
    def priority(self) -> int:
        """Priority; higher is served earlier."""
        return self.message.priority

    @property
    def effective_arrival(self) -> float:
        """Sort key in queues, lowest first: arrival time minus the priority's credit."""
        return effective_arrival(self.arrival, self.priority)

    @property
    def min_tokens(self) -> int:
        """Minimum tokens per output; `max_tokens` if nothing else can end an output."""
        stop = self.message.stop
        ends = stop.strings or stop.token_ids or self.constraint is not None
        endless = stop.ignore_eos and not ends
        return self.max_tokens if endless else stop.min_tokens

    @property
    def whole(self) -> bool:
        """Whether outputs are sent only when complete."""
        return self.message.HasField("beam") or self.message.output.final_only

    def submit(self) -> engine_pb2.Submit:
        """Return the message that starts the request on an engine, without text options."""
        message = self.message
        submit = engine_pb2.Submit(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            stop=message.stop,
            output=message.output,
            priority=message.priority,
            cache_salt=self.salt,
            adapter=self.adapter,
            bad_words=[engine_pb2.TokenSequence(token_ids=ids) for ids in self.bad_words],
            images=[
                engine_pb2.PromptImage(digest=span.digest, start=span.start, end=span.end)
                for span, _ in self.images
            ],
        )
        if self.constraint is not None:
            submit.constraint.CopyFrom(self.constraint)
        submit.stop.max_tokens = self.max_tokens
        submit.stop.ClearField("strings")
        submit.stop.ClearField("include_in_output")
        submit.stop.ClearField("max_reasoning_tokens")
        submit.stop.ClearField("fit_limits")
        if message.HasField("beam"):
            submit.beam.CopyFrom(message.beam)
        else:
            submit.sampling.CopyFrom(message.sampling)
            submit.sampling.seed = self.seed
        return submit
