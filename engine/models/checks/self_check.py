"""Compares a loaded model with transformers' own forward pass before it serves requests.

Three relations must hold for the logits of some random tokens:

- *alone*: the paged step returns the logits of transformers' eager forward pass;
- *packed*: so it does beside other sequences in one flat batch, one of them at the end of the
  context;
- *chunked*: so it does when the prompt is computed in chunks and token by token.

A model whose masks, positions or state are not as Octavo assumes breaks one of them.

In fewer than 32 bits, rounding may send a token to another expert of a mixture of experts. So the
first relation is checked with the experts that transformers' pass chose, and

- *routed*: the experts that the step chose itself, and their weights, are those of the pass.

Steps made of that model later, such as a compiled one, choose for themselves; they are compared
with the logits of the checked step, whose weights are theirs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octavo.common.models.errors import ModelError
from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.step import Step
from octavo.kernels.metadata import AttentionMetadata

if TYPE_CHECKING:  # it imports transformers, which a compiled step starts without
    from octavo.engine.models.checks.routing import Choice, Routing

log = structlog.get_logger(__name__)

TOKENS = 40
ROWS = (0, 7, 13, 19, 24, 29, 34, 39)
"""Tokens with compared logits."""
BEFORE, AFTER = 17, 5
"""Tokens of the sequences packed before and after the compared one."""
CHUNKS = (19, 38, 39, 40)
"""Ends of the prompt's chunks; chunks of one token are decodes."""

FLOAT32_TOLERANCE = 0.01
SIXTEEN_BIT_TOLERANCE = 0.2
FP8_CACHE_TOLERANCE = 0.35
"""Largest errors: the root mean square of the differences of a row's logits, divided by the row's
standard deviation."""
QUANTILE = 0.75
"""The quantile of the rows' errors that must be tolerable in fewer than 32 bits, where rounding may
route a token of a mixture of experts to another expert."""


class SelfCheckError(ModelError):
    """The model's logits are not those of transformers' own forward pass."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The logits of transformers' eager forward pass.

    Attributes:
        tokens: `[TOKENS]` int64 token ids, on the CPU.
        logits: `[len(ROWS), vocab_size]`, on the CPU.
        choices: Of each layer of experts, in order. They are not saved.
    """

    tokens: Tensor
    logits: Tensor
    choices: "tuple[Choice, ...]" = ()

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        save_file({"tokens": self.tokens, "logits": self.logits}, path)

    @classmethod
    def load(cls, path: Path) -> "Reference":
        """Read a file that `save` wrote.

        Raises:
            OSError: There is no such file.
        """
        tensors = load_file(path)
        return cls(tensors["tokens"], tensors["logits"])


@torch.inference_mode()
def reference(model: nn.Module, shape: ModelShape, routing: "Routing") -> Reference:
    """Run transformers' eager forward pass.

    Args:
        model: A transformers model with its attention, not Octavo's.
        shape: Its dimensions.
        routing: Its layers of experts.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    count = min(TOKENS, shape.max_position)
    tokens = torch.randint(shape.vocab_size, (count,), generator=generator)
    with routing.recorded() as choices:
        logits = model(input_ids=tokens[None].to(device), use_cache=False).logits[0]
    return Reference(tokens, logits[_rows(count)].cpu().contiguous(), tuple(choices))


def _rows(count: int) -> list[int]:
    return [row for row in ROWS if row < count]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A range of a sequence's tokens in a flat batch.

    Attributes:
        tokens: The sequence, `[n]` int64.
        start: The first token that this step computes.
        end: The token after the last.
        place: The number of the sequence, by which it has blocks of its own.
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
        expected: The logits of transformers' eager forward pass; those of a checked step once one
            has chosen other experts for rounding.
        tolerance: The quantization's tolerance for them.

    Args:
        expected: See above.
        shape: The model's dimensions.
        dtype: Of activations.
        device: Where the step runs.
        block_size: Tokens per block.
        tolerance: See above; 0 if the weights are not quantized.
        cache_dtype: Of the KV cache; default `dtype`.
        kv_scales: Each layer's (key scale, value scale) of an fp8 KV cache.
        routing: The layers of experts of the first step's model.
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
        routing: "Routing | None" = None,
    ) -> None:
        cache_dtype = cache_dtype or dtype
        self.expected = expected
        self.tolerance = tolerance
        self._dtype = dtype
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
        self._planners = layout.planners(dtype, cache_dtype, device)
        self._rounding = FLOAT32_TOLERANCE if dtype == torch.float32 else SIXTEEN_BIT_TOLERANCE
        if cache_dtype != dtype:
            self._rounding = max(self._rounding, FP8_CACHE_TOLERANCE)
        self._exact = dtype == torch.float32 and not tolerance
        self._routing = routing if expected.choices and not self._exact else None

    @torch.inference_mode()
    def __call__(self, step: Step) -> None:
        """Check a step.

        Raises:
            SelfCheckError: A relation does not hold; the message names it.
        """
        began = time.perf_counter()
        tokens, rows = self.expected.tokens, _rows(len(self.expected.tokens))
        own = _Chunk(tokens, 0, len(tokens), 1)
        alone = self._logits(step, [own], rows)
        errors = self._compare_alone(step, own, rows, alone)
        before, after = tokens[:BEFORE].flip(0), tokens[-AFTER:]
        packed = self._logits(
            step,
            [
                _Chunk(before, 0, len(before), 0),
                own,
                _Chunk(after, 0, len(after), 2, self._max_position - len(after)),
            ],
            [len(before) + row for row in rows],
        )
        errors["packed"] = self._compare(
            packed,
            alone,
            0.0,
            "packed with other sequences, a prompt's logits are not its logits alone",
        )
        errors["chunked"] = self._compare(
            self._in_chunks(step, tokens),
            alone,
            0.0,
            "in chunks and token by token, a prompt's logits are not its logits at once",
        )
        log.info(
            "self-check passed",
            seconds=round(time.perf_counter() - began, 3),
            **{name: float(f"{error:.2g}") for name, error in errors.items()},
        )

        if self._routing is not None:
            self.expected = Reference(tokens, alone.contiguous())
            self.tolerance, self._routing = 0.0, None

    def _compare_alone(
        self, step: Step, own: _Chunk, rows: list[int], alone: Tensor
    ) -> dict[str, float]:
        """Return the errors of a step that runs a prompt alone, by the relations' names.

        Args:
            step: The step.
            own: The prompt.
            rows: The compared rows.
            alone: Their logits.

        Raises:
            SelfCheckError: A relation does not hold.
        """
        errors = {}
        if self._routing is not None:
            expected = self.expected.choices
            with self._routing.forced(expected) as chosen:
                alone = self._logits(step, [own], rows)
            errors["routed"] = self._check_error(
                max(a.error(b) for a, b in zip(chosen, expected, strict=True)),
                self.tolerance,
                "a prompt's experts are not those of transformers' eager forward pass",
                "of its choices",
            )
        errors["alone"] = self._compare(
            alone,
            self.expected.logits,
            self.tolerance,
            "alone, a prompt's logits are not those of transformers' eager forward pass",
        )
        return errors

    def _in_chunks(self, step: Step, tokens: Tensor) -> Tensor:
        """Return the compared rows, computed in several steps."""
        ends = sorted({min(end, len(tokens)) for end in CHUNKS})
        found = []
        for start, end in zip([0, *ends], ends, strict=False):
            rows = [row - start for row in _rows(end) if row >= start]
            chunk = _Chunk(tokens, start, end, 1)
            logits = self._logits(step, [chunk], rows or [0])
            found += [logits] if rows else []
        return torch.cat(found)

    def _logits(self, step: Step, chunks: Sequence[_Chunk], rows: list[int]) -> Tensor:
        """Run one step; return logits `[len(rows), vocab_size]` float32 on the CPU."""
        device = self._device
        query_lens = torch.tensor([chunk.end - chunk.start for chunk in chunks], dtype=torch.int32)
        seq_lens = torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32)
        computed = [torch.arange(chunk.start, chunk.end) for chunk in chunks]
        positions = [c.first_position + at for c, at in zip(chunks, computed, strict=True)]
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0)]).int()
        groups = []
        for plan, tables, slots in zip(
            self._planners, *self._tables_and_slots(chunks, computed), strict=True
        ):
            groups.append(
                AttentionMetadata(
                    query_starts=starts.to(device),
                    seq_lens=seq_lens.to(device),
                    block_tables=tables.to(device),
                    slot_mapping=slots.to(device),
                    max_query_len=int(query_lens.max()),
                    max_seq_len=int(seq_lens.max()),
                    plan=plan(query_lens.numpy(), seq_lens.numpy()),
                )
            )
        token_ids = torch.cat([chunk.tokens[chunk.start : chunk.end] for chunk in chunks])
        with attending(PagedStep(groups, self._cache.layers, self._kv_scales, self._cache.states)):
            logits = step(
                token_ids[None].to(device),
                torch.cat(positions)[None].to(device),
                torch.tensor(rows, device=device),
            )
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

    def _compare(self, found: Tensor, expected: Tensor, tolerance: float, broken: str) -> float:
        """Return the error between two sets of logits.

        Raises:
            SelfCheckError: It is above `tolerance` and what rounding explains.
        """
        expected = expected.float()
        scale = (expected - expected.mean(1, keepdim=True)).norm(dim=1).clamp_min(1e-12)
        by_row = (found - expected).norm(dim=1) / scale
        return self._check_error(
            float(by_row.max() if self._exact else by_row.quantile(QUANTILE)),
            tolerance,
            broken,
            "of their standard deviation",
        )

    def _check_error(self, error: float, tolerance: float, broken: str, unit: str) -> float:
        """Return an error.

        Raises:
            SelfCheckError: It is above `tolerance` and what rounding explains.
        """
        most = max(self._rounding, tolerance)
        if not error <= most:  # also if it is NaN
            raise SelfCheckError(
                f"self-check failed: {broken}: they differ by {error:.1%} {unit}, and the limit is"
                f" {most:.0%}"
            )
        return error
