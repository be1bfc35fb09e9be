"""Holds a loaded model to transformers' own forward pass before it serves anybody.

Three relations must hold of what a model computes of some random tokens:

- *alone*: the paged step gives the logits of transformers' eager forward pass;
- *packed*: the same beside other sequences in one flat batch, one of them at the
  far end of the context;
- *chunked*: the same in chunks of a prompt and token by token.

A model that reads its mask, its positions or its state otherwise than Octavo
assumes breaks one of them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octavo.common.models.errors import ModelError
from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.step import Step
from octavo.engine.settings import Quantization
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.ops import plan_attention

log = structlog.get_logger(__name__)

TOKENS = 40
ROWS = (0, 7, 13, 19, 24, 29, 34, 39)
"""Tokens whose logits are compared."""
BEFORE, AFTER = 17, 5
"""Tokens of the sequences packed before and after the one that is compared."""
CHUNKS = (19, 38, 39, 40)
"""Where the chunks of the prompt end; those of one token are decodes."""

MOST_IN_FLOAT32 = 0.01
MOST_IN_16_BITS = 0.2
MOST_QUANTIZED = {"none": 0.0, "int8": 0.35, "int4": 0.7}
MOST_OF_FP8_CACHE = 0.35
"""Largest errors: the root mean square of the differences of a row's logits, as a share of
the root mean square of the row about its mean."""
QUANTILE = 0.75
"""The row that must hold in fewer bits than 32, where a rounding may send a token of a
mixture of experts to another expert."""


class SelfCheckError(ModelError):
    """The model does not compute what transformers computes of it."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What transformers computes.

    Attributes:
        tokens: `[TOKENS]` int64 token ids, on the CPU.
        logits: `[len(ROWS), vocab_size]`, on the CPU.
    """

    tokens: Tensor
    logits: Tensor

    def save(self, path: Path) -> None:
        """Write it as safetensors."""
        save_file({"tokens": self.tokens, "logits": self.logits}, path)

    @classmethod
    def load(cls, path: Path) -> "Reference":
        """Read what `save` wrote.

        Raises:
            OSError: there is no such file.
        """
        tensors = load_file(path)
        return cls(tensors["tokens"], tensors["logits"])


@torch.inference_mode()
def reference(model: nn.Module, shape: ModelShape) -> Reference:
    """Run transformers' eager forward pass.

    Args:
        model: transformers', with its attention implementation set to "eager".
        shape: its figures.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    count = min(TOKENS, shape.max_position)
    tokens = torch.randint(shape.vocab_size, (count,), generator=generator)
    logits = model(input_ids=tokens[None].to(device), use_cache=False).logits[0]
    return Reference(tokens, logits[_rows(count)].cpu().contiguous())


def _rows(count: int) -> list[int]:
    return [row for row in ROWS if row < count]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some tokens of a sequence in a flat batch.

    Attributes:
        tokens: the sequence's, `[n]` int64.
        start: the first that this step computes.
        end: the one after the last.
        first_block: of the cache; the sequence's blocks follow each other.
        first_position: the position of the sequence's first token.
    """

    tokens: Tensor
    start: int
    end: int
    first_block: int
    first_position: int = 0


class SelfCheck:
    """The three relations, for one step.

    Args:
        shape: the model's figures.
        dtype: of activations.
        device: where the step runs.
        block_size: tokens in a block.
        quantization: of the weights.
        cache_dtype: of the KV cache, if it is not `dtype`.
        kv_scales: each layer's (key scale, value scale), where that is fp8.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        block_size: int,
        quantization: Quantization,
        cache_dtype: torch.dtype | None = None,
        kv_scales: list[tuple[float, float]] | None = None,
    ) -> None:
        cache_dtype = cache_dtype or dtype
        self._dtype = dtype
        self._kv_scales = kv_scales
        self._device = device
        self._block_size = block_size
        self._max_position = shape.max_position
        self._blocks_each = -(-TOKENS // block_size)
        self._cache = CacheTensors(
            shape,
            num_blocks=3 * self._blocks_each,
            num_swap_blocks=0,
            block_size=block_size,
            dtype=cache_dtype,
            device=device,
        )
        self._plan = partial(
            plan_attention,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            cache_dtype=cache_dtype,
            device=device,
        )
        self._rounding = MOST_IN_FLOAT32 if dtype == torch.float32 else MOST_IN_16_BITS
        if cache_dtype != dtype:
            self._rounding = max(self._rounding, MOST_OF_FP8_CACHE)
        self._storage = MOST_QUANTIZED[quantization]

    @torch.inference_mode()
    def run(self, step: Step, expected: Reference) -> None:
        """Check a step.

        Args:
            step: to check.
            expected: what transformers computes.

        Raises:
            SelfCheckError: a relation does not hold; the message names it.
        """
        began = time.perf_counter()
        tokens, rows = expected.tokens, _rows(len(expected.tokens))
        own = _Part(tokens, 0, len(tokens), self._blocks_each)
        alone = self._logits(step, [own], rows)
        errors = {
            "alone": self._compare(
                alone,
                expected.logits,
                self._storage,
                "alone, a prompt's logits are not those of transformers' eager forward pass",
            )
        }
        before, after = tokens[:BEFORE].flip(0), tokens[-AFTER:]
        packed = self._logits(
            step,
            [
                _Part(before, 0, len(before), 0),
                own,
                _Part(after, 0, len(after), 2 * self._blocks_each, self._max_position - len(after)),
            ],
            [len(before) + row for row in rows],
        )
        errors["packed"] = self._compare(
            packed,
            alone,
            0.0,
            "packed with other sequences, a prompt's logits are not those that it has alone",
        )
        errors["chunked"] = self._compare(
            self._in_chunks(step, tokens),
            alone,
            0.0,
            "in chunks and token by token, a prompt's logits are not those of it whole",
        )
        log.info(
            "self-check passed",
            seconds=round(time.perf_counter() - began, 3),
            **{name: float(f"{error:.2g}") for name, error in errors.items()},
        )

    def _in_chunks(self, step: Step, tokens: Tensor) -> Tensor:
        """Return the compared rows, computed in several steps."""
        ends = sorted({min(end, len(tokens)) for end in CHUNKS})
        found = []
        for start, end in zip([0, *ends], ends, strict=False):
            rows = [row - start for row in _rows(end) if row >= start]
            part = _Part(tokens, start, end, self._blocks_each)
            logits = self._logits(step, [part], rows or [0])
            found += [logits] if rows else []
        return torch.cat(found)

    def _logits(self, step: Step, parts: Sequence[_Part], rows: list[int]) -> Tensor:
        """Run one step; return logits `[len(rows), vocab_size]` float32 on the CPU."""
        size, device = self._block_size, self._device
        query_lens = torch.tensor([part.end - part.start for part in parts], dtype=torch.int32)
        seq_lens = torch.tensor([part.end for part in parts], dtype=torch.int32)
        computed = [torch.arange(part.start, part.end) for part in parts]
        tables = [part.first_block + torch.arange(self._blocks_each) for part in parts]
        slots = [p.first_block * size + at for p, at in zip(parts, computed, strict=True)]
        positions = [p.first_position + at for p, at in zip(parts, computed, strict=True)]
        metadata = AttentionMetadata(
            query_starts=torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0)])
            .int()
            .to(device),
            seq_lens=seq_lens.to(device),
            block_tables=torch.stack(tables).int().to(device),
            slot_mapping=torch.cat(slots).to(device),
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            plan=self._plan(query_lens.numpy(), seq_lens.numpy()),
        )
        token_ids = torch.cat([part.tokens[part.start : part.end] for part in parts])
        with attending(PagedStep(metadata, self._cache.layers, self._kv_scales)):
            logits = step(
                token_ids[None].to(device),
                torch.cat(positions)[None].to(device),
                torch.tensor(rows, device=device),
            )
        return logits.float().cpu()

    def _compare(self, found: Tensor, expected: Tensor, storage: float, broken: str) -> float:
        """Return the error of two sets of logits.

        Raises:
            SelfCheckError: it is more than rounding, and `storage` of the weights, explain.
        """
        expected = expected.float()
        scale = (expected - expected.mean(1, keepdim=True)).norm(dim=1).clamp_min(1e-12)
        by_row = (found - expected).norm(dim=1) / scale
        exact = self._dtype == torch.float32 and not storage
        error = float(by_row.max() if exact else by_row.quantile(QUANTILE))
        most = max(self._rounding, storage)
        if not error <= most:  # also when it is no number
            raise SelfCheckError(
                f"self-check failed: {broken}: they differ by {error:.1%} of their spread, and"
                f" {most:.0%} may be lost to rounding"
            )
        return error
