"""Compares a loaded model with transformers' own forward pass before it serves requests.

Three relations must hold for the logits of some random tokens:

- *alone*: the paged step returns the logits of transformers' eager forward pass in float32;
- *packed*: it returns the same beside other sequences in one flat batch, one of them at the end of
  the context;
- *chunked*: it returns the same when the prompt is computed in chunks and token by token.

A model whose masks, positions or state differ from Octavo's assumptions breaks one of them. In 16
bits or fewer, rounding hides small faults. So such a model is checked twice: first in float32 with
the same weights (`widened.py`), where rounding hides nothing, then as it serves.

Rounding may also route a token to another expert. So logits are compared under the routing of
transformers' pass, and

- *routed*: the step's own choice of experts, and their weights, match the pass.
"""

import math
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from octavo.common.models.errors import ModelError
from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.checks.reference import (
    PASSES,
    TOKENS,
    Reference,
    compared_rows,
    row_errors,
)
from octavo.engine.models.checks.routing import Choice, Routing
from octavo.engine.models.forward import Forward
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.ops import plan_attention

log = structlog.get_logger(__name__)

OWN = 1
"""The compared sequence's number in a batch."""
BEFORE, AFTER = 17, 5
"""Numbers of tokens of the sequences packed before and after the compared one."""
CHUNKS = (19, 38, 39, 40)
"""Ends of the prompt's chunks; chunks of one token are decodes."""

FLOAT32_TOLERANCE = 0.001
COARSE_FLOAT32_TOLERANCE = 0.01
"""Tolerance on a GPU, whose products may be coarser than float32, and with quantized weights."""
SIXTEEN_BIT_TOLERANCE = 0.05
ROUNDING_FACTOR = 2.0
"""In 16 bits, the greatest error of a row and the quantile of all errors may reach this multiple of
those of transformers' own 16-bit pass, if that exceeds the tolerance."""
FREE_TOLERANCE = 0.2
FP8_CACHE_TOLERANCE = 0.35
CACHE_TOLERANCES = {torch.int8: 0.1}
"""Maximum errors of a row's logits; see `row_errors`. `FREE_TOLERANCE` is for 16-bit steps that
choose their experts themselves."""
QUANTILE = 0.75
"""The quantile of the rows' errors that must be within the tolerance. With those two and with
quantized weights, the greatest error has no limit."""
FLOAT32_FLIPS, SIXTEEN_BIT_FLIPS = 0.03, 0.2
"""Maximum shares of a layer's choices that rounding may change. In float32 it is one of the
prompt's tokens, as two experts may be equally good; with an fp8 cache, as many as in 16 bits."""


class SelfCheckError(ModelError):
    """The model's logits differ from those of transformers' own forward pass."""


class _Limit(NamedTuple):
    """Maximum errors of rows.

    Attributes:
        usual: Maximum of the quantile of the rows' errors.
        greatest: Maximum of the greatest error.
    """

    usual: float
    greatest: float = math.inf


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A range of a sequence's tokens in a flat batch.

    Attributes:
        tokens: The sequence, `[n]` int64.
        start: The first token that this step computes.
        end: The token after the last.
        place: The sequence's number, which determines its blocks.
        first_position: The position of the sequence's first token.
    """

    tokens: Tensor
    start: int
    end: int
    place: int
    first_position: int = 0


class SelfCheck:
    """Checks the relations for a step of one model.

    Attributes:
        expected: The results of transformers' forward pass, or of another step after `follow`.
        tolerance: The quantization's tolerance.

    Args:
        expected: The results to compare with.
        shape: The model's dimensions.
        dtype: Type of activations.
        device: The step's device.
        block_size: Tokens per block.
        tolerance: The relative error allowed for quantization; 0 without quantization.
        cache_dtype: Type of the KV cache; default `dtype`.
        kv_scales: Each layer's (key scale, value scale) of an fp8 KV cache.
        routing: Forces `expected.choices` on compared steps; None if they cannot be forced.
        measure: Adds the rounding errors of one more pass with this number, if not measured yet;
            see `reference.py`.
    """

    def __init__(
        self,
        expected: Reference,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        block_size: int,
        tolerance: float = 0.0,
        cache_dtype: torch.dtype | None = None,
        kv_scales: list[tuple[float, float]] | None = None,
        routing: Routing | None = None,
        measure: Callable[[Reference, int], Reference] | None = None,
    ) -> None:
        cache_dtype = cache_dtype or dtype
        self.expected = expected
        self.tolerance = tolerance
        self._dtype, self._cache_dtype = dtype, cache_dtype
        self._kv_scales = kv_scales
        self._device = device
        self._max_position = shape.max_position
        layout = plan_layout(shape, block_size, dtype, cache_dtype)
        self._cache = CacheTensors(
            layout,
            num_blocks=3 * sum(layout.sequence_blocks(TOKENS)),
            num_swap_blocks=0,
            dtype=cache_dtype,
            device=device,
            model_dtype=dtype,
        )
        self._shapes = layout.attention_shapes(dtype, cache_dtype, device)
        self._routing = routing
        self._measure = measure
        self._passes = 0
        self._set_limits()

    @torch.inference_mode()
    def __call__(self, forward: Forward, *, known: bool = False) -> None:
        """Check a step.

        Args:
            forward: The step.
            known: Whether a step of the same code and files has passed before: then only values in
                memory may differ, which one relation shows.

        Raises:
            SelfCheckError: A relation does not hold; the message names it.
        """
        began = time.perf_counter()
        tokens, rows = self.expected.tokens, compared_rows(len(self.expected.tokens))
        whole = _Chunk(tokens, 0, len(tokens), OWN)
        alone, chosen = self._run(forward, [whole], rows)
        errors = {
            "alone": self._compare(
                alone,
                self.expected.logits,
                "alone, a prompt's logits are not those of transformers' forward pass",
                self.tolerance,
            )
        }
        if not known:
            errors |= self._check_batches(forward, alone)
        errors |= self._check_routing(chosen)  # last: ranks differ in it, and must meet before
        log.info(
            "self-check passed",
            seconds=round(time.perf_counter() - began, 3),
            dtype=str(self._dtype).removeprefix("torch."),
            **{name: float(f"{error:.2g}") for name, error in errors.items()},
        )

    def _check_batches(self, forward: Forward, alone: Tensor) -> dict[str, float]:
        """Return the differences of logits in other batches, by the relation's name.

        Args:
            forward: The step.
            alone: The logits of the compared rows alone.

        Raises:
            SelfCheckError: They differ by more than rounding explains.
        """
        tokens, rows = self.expected.tokens, compared_rows(len(self.expected.tokens))
        whole = _Chunk(tokens, 0, len(tokens), OWN)
        before, after = tokens[:BEFORE].flip(0), tokens[-AFTER:]
        packed, _ = self._run(
            forward,
            [
                _Chunk(before, 0, len(before), 0),
                whole,
                _Chunk(after, 0, len(after), 2, self._max_position - len(after)),
            ],
            [len(before) + row for row in rows],
        )
        packed_error = self._compare(
            packed,
            alone,
            "packed with other sequences, a prompt's logits are not its logits alone",
        )
        chunked_error = self._compare(
            self._in_chunks(forward, tokens),
            alone,
            "in chunks and token by token, a prompt's logits are not its logits at once",
        )
        return {"packed": packed_error, "chunked": chunked_error}

    @torch.inference_mode()
    def follow(self, forward: Forward) -> "SelfCheck":
        """Return the check for steps of the same model whose experts cannot be forced.

        Args:
            forward: A checked step; others must compute the same.
        """
        tokens, rows = self.expected.tokens, compared_rows(len(self.expected.tokens))
        logits = self._logits(forward, [_Chunk(tokens, 0, len(tokens), OWN)], rows)
        free = bool(self.expected.choices)
        other = self.against(replace(self.expected, logits=logits, choices=(), free=free))
        other.tolerance = 0.0
        return other

    def against(self, expected: Reference) -> "SelfCheck":
        """Return the check for steps of the same model with other expected results."""
        other = copy(self)
        other.expected, other._measure = expected, None  # noqa: SLF001 - its own
        other._set_limits()  # noqa: SLF001 - its own
        return other

    def routed(self, routing: Routing) -> "SelfCheck":
        """Return the check for steps with another way of forcing experts."""
        other = copy(self)
        other._routing = routing if self.expected.choices else None  # noqa: SLF001 - its own
        return other

    def _set_limits(self) -> None:
        self._limit = self._tolerable_rounding()
        if not self.expected.choices:
            self._routing = None

    def _tolerable_rounding(self) -> _Limit:
        """Return the limits that rounding explains, except rounding of weights."""
        if self._cache_dtype != self._dtype:
            return _Limit(CACHE_TOLERANCES.get(self._cache_dtype, FP8_CACHE_TOLERANCE))
        if self._dtype == torch.float32:
            fine = not self.tolerance and self._device.type == "cpu"
            most = FLOAT32_TOLERANCE if fine else COARSE_FLOAT32_TOLERANCE
            return _Limit(most, most)
        if self.expected.free:
            return _Limit(FREE_TOLERANCE)
        rounding = self.expected.rounding
        return _Limit(
            max(SIXTEEN_BIT_TOLERANCE, ROUNDING_FACTOR * float(rounding.quantile(QUANTILE))),
            max(SIXTEEN_BIT_TOLERANCE, ROUNDING_FACTOR * float(rounding.max())),
        )

    def _in_chunks(self, forward: Forward, tokens: Tensor) -> Tensor:
        """Return the compared rows, computed in several steps."""
        ends = sorted({min(end, len(tokens)) for end in CHUNKS})
        parts = []
        for start, end in zip([0, *ends], ends, strict=False):
            rows = [row - start for row in compared_rows(end) if row >= start]
            chunk = _Chunk(tokens, start, end, OWN)
            logits, _ = self._run(forward, [chunk], rows or [0])
            parts += [logits] if rows else []
        return torch.cat(parts)

    def _run(
        self, forward: Forward, chunks: Sequence[_Chunk], rows: list[int]
    ) -> tuple[Tensor, list[Choice]]:
        """Run one step with the routing of transformers' pass.

        Returns:
            Logits `[len(rows), vocab_size]` float32 on the CPU; the experts that the step would
            have chosen for the compared sequence.
        """
        if self._routing is None:
            return self._logits(forward, chunks, rows), []
        lengths = [chunk.end - chunk.start for chunk in chunks]
        (index,) = (number for number, chunk in enumerate(chunks) if chunk.place == OWN)
        start, end = chunks[index].start, chunks[index].end
        choices = [choice.part(start, end) for choice in self.expected.choices]
        with self._routing.forced(choices, sum(lengths[:index])) as chosen:
            logits = self._logits(forward, chunks, rows)
        return logits, chosen

    def _logits(self, forward: Forward, chunks: Sequence[_Chunk], rows: list[int]) -> Tensor:
        """Run one step; return logits `[len(rows), vocab_size]` float32 on the CPU."""
        device = self._device
        query_lens = torch.tensor([chunk.end - chunk.start for chunk in chunks], dtype=torch.int32)
        seq_lens = torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32)
        computed = [torch.arange(chunk.start, chunk.end) for chunk in chunks]
        positions = [c.first_position + at for c, at in zip(chunks, computed, strict=True)]
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0)]).int()
        groups = []
        for shape, tables, slots in zip(
            self._shapes, *self._tables_and_slots(chunks, computed), strict=True
        ):
            groups.append(
                AttentionMetadata(
                    query_starts=starts.to(device),
                    seq_lens=seq_lens.to(device),
                    block_tables=tables.to(device),
                    slot_mapping=slots.to(device),
                    max_query_len=int(query_lens.max()),
                    max_seq_len=int(seq_lens.max()),
                    plan=plan_attention(query_lens.numpy(), seq_lens.numpy(), shape),
                )
            )
        token_ids = torch.cat([chunk.tokens[chunk.start : chunk.end] for chunk in chunks])
        laid = torch.stack([token_ids, torch.cat(positions)]).to(device)  # as the engine's inputs
        with attending(PagedStep(groups, self._cache.layers, self._kv_scales, self._cache.states)):
            logits = forward(laid[:1], laid[1:], torch.tensor(rows, device=device))
        return logits.float().cpu()

    def _tables_and_slots(
        self, chunks: Sequence[_Chunk], computed: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the block tables and the slots of each layer group."""
        layout = self._cache.layout
        counts = layout.sequence_blocks(TOKENS)
        tables, slots = [], []
        for group, layers in enumerate(layout.groups):
            firsts = [chunk.place * sum(counts) + sum(counts[:group]) for chunk in chunks]
            tables.append(
                torch.stack([first + torch.arange(counts[group]) for first in firsts]).int()
            )
            places = zip(firsts, computed, strict=True)
            slots.append(torch.cat([first * layers.block_size + at for first, at in places]))
        return tables, slots

    def _check_routing(self, chosen: list[Choice]) -> dict[str, float]:
        """Return the differences of a step's choices, by the relation's name.

        Raises:
            SelfCheckError: They differ by more than rounding explains.
        """
        if self._routing is None:
            return {}
        broken = "a prompt's experts are not those of transformers' forward pass"
        pairs = list(zip(chosen, self.expected.choices, strict=True))
        weights = max(choice.weight_error(expected) for choice, expected in pairs)
        unlike = max(choice.unlike(expected) for choice, expected in pairs)
        most = flips = SIXTEEN_BIT_FLIPS
        if self._dtype == torch.float32:
            most = self._limit.usual
            flips = FLOAT32_FLIPS if self._cache_dtype == self._dtype else SIXTEEN_BIT_FLIPS
        self._check_error(weights, max(most, self.tolerance), broken, "of their weights")
        self._check_error(unlike, max(flips, self.tolerance), broken, "of its choices")
        return {"routed": max(weights, unlike)}

    def _compare(
        self, computed: Tensor, expected: Tensor, broken: str, tolerance: float = 0
    ) -> float:
        """Return the error between two sets of logits.

        Args:
            computed: `[rows, vocab_size]` float32.
            expected: `[rows, vocab_size]` float32.
            broken: The relation that fails if they differ.
            tolerance: The quantization's tolerance, if it applies.

        Raises:
            SelfCheckError: They differ by more than the tolerance and rounding explain.
        """
        errors, unit = row_errors(computed, expected), "of their standard deviation"
        limit = self._limit_for(errors, tolerance)
        usual = self._check_error(float(errors.quantile(QUANTILE)), limit.usual, broken, unit)
        if limit.greatest == math.inf:
            return usual
        return self._check_error(float(errors.max()), limit.greatest, broken, unit)

    def _limit_for(self, errors: Tensor, tolerance: float) -> _Limit:
        """Return the limit of errors; if errors exceed it, measure transformers' rounding first."""
        while True:
            limit = _Limit(max(self._limit.usual, tolerance)) if tolerance else self._limit
            usual, greatest = float(errors.quantile(QUANTILE)), float(errors.max())
            passes = usual <= limit.usual and greatest <= limit.greatest
            if passes or self._measure is None or self._passes == PASSES:
                return limit
            self.expected = self._measure(self.expected, self._passes)
            self._passes += 1
            self._set_limits()

    def _check_error(self, error: float, most: float, broken: str, unit: str) -> float:
        """Return an error.

        Raises:
            SelfCheckError: It is above the limit.
        """
        if not error <= most:  # also for NaN
            dtype = str(self._dtype).removeprefix("torch.")
            raise SelfCheckError(
                f"self-check failed: {broken}: in {dtype} they differ by {error:.1%} {unit}, and"
                f" the limit is {most:.1%}"
            )
        return error
