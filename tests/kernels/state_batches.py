"""Random batches for stateful layers, and checks for any implementation."""

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st

from octavo.kernels import reference_states, states
from octavo.kernels.state_rows import StateRows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
OPERATIONS = ("causal_conv", "ssd", "gated_delta", "selective_scan")


@dataclass(frozen=True)
class StateCase:
    """A call without the tensors' values.

    Sizes that an operation lacks are not read.
    """

    operation: str
    lengths: list[tuple[int, int]]  # (queries, tokens) of each sequence
    heads: int = 2
    shared: int = 1  # heads of a group, or of a key head
    size: int = 16  # channels, head_dim, key_dim
    state_size: int = 16  # value_dim
    width: int = 4
    per_row: int = 16  # channels per row
    rows_per_block: int = 3
    first_row: int = 1
    dtype: torch.dtype = torch.float32
    options: frozenset[str] = frozenset()
    seed: int = 0


@dataclass
class StateCall:
    """A case's tensors. Values that must not be read are NaN."""

    arguments: list[Any]
    rows: StateRows
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, kernels: Any, operation: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results and the cache after them."""
        rows = replace(self.rows, state=_copy(self.rows.state))
        out = getattr(kernels, operation)(*self.arguments, rows, **self.options)
        return out, rows.state


@st.composite
def state_cases(
    draw: st.DrawFn,
    operation: str,
    longest: int = 70,
    most_size: int = 72,
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES),
) -> StateCase:
    """Draw batches of new and old sequences, decodes and padding."""
    lengths = []
    for _ in range(draw(st.integers(1, 4))):
        queries = draw(st.just(1) | st.integers(0, 4) | st.integers(0, longest))
        tokens = draw(st.just(queries) | st.integers(queries, queries + 9) | st.just(0))
        lengths.append((queries, tokens))
    flags = {"bias", "d", "dt_bias", "softplus", "limits", "elements", "normalize", "silu"}
    return StateCase(
        operation=operation,
        lengths=lengths,
        heads=draw(st.integers(1, 3)),
        shared=draw(st.integers(1, 3)),
        size=draw(st.integers(1, 20) | st.sampled_from([32, most_size])),
        state_size=draw(st.integers(1, 20) | st.sampled_from([16, 32, most_size])),
        width=draw(st.sampled_from([2, 3, 4, 8])),
        per_row=draw(st.integers(1, 40)),
        rows_per_block=draw(st.integers(1, 4)),
        first_row=draw(st.integers(0, 5)),
        dtype=draw(st.sampled_from(dtypes)),
        options=frozenset(draw(st.sets(st.sampled_from(sorted(flags))))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def build(case: StateCase, device: str = "cpu") -> StateCall:
    """Return a case's tensors."""
    numbers = _Numbers(case, device)
    call = numbers.make_call()
    return StateCall(call.arguments, call.rows, call.options)


def check(kernels: Any, case: StateCase, device: str = "cpu") -> None:
    """Compare an implementation with the definition."""
    call = build(case, device)
    expected, state = call.run(reference_states, case.operation)
    found, found_state = call.run(kernels, case.operation)
    assert found.dtype == expected.dtype
    assert found.is_contiguous()
    compare(found, expected, TOLERANCES[case.dtype])
    compare(found_state, state, TOLERANCES[state.dtype])


def compare(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compare relative to the greatest value; NaN only equals itself."""
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = found.float().nan_to_num(), expected.float().nan_to_num()
    greatest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, atol=tolerance * max(greatest, 1e-3), rtol=0)


def _copy(state: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides."""
    room = state.new_full((state.shape[0] * state.stride(0),), math.nan)
    return room.as_strided(state.shape, state.stride()).copy_(state)


class _Numbers:
    def __init__(self, case: StateCase, device: str) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(case.seed)
        self.tokens = sum(queries for queries, _ in case.lengths)

    def make_call(self) -> StateCall:
        """Return the arguments of the case's operation."""
        call: StateCall = getattr(self, f"_{self.case.operation}")()
        return call

    def _causal_conv(self) -> StateCall:
        case, options = self.case, self.case.options
        weight = self._normal(case.size, case.width)
        bias = self._normal(case.size) if "bias" in options else None
        rows = self._rows(-(-case.size // case.per_row), (case.per_row, case.width - 1), case.dtype)
        activation = "silu" if "silu" in options else None
        x = self._wide(case.size)
        return StateCall([x, weight, bias], rows, {"activation": activation})

    def _ssd(self) -> StateCall:
        case, options = self.case, self.case.options
        heads = case.heads * case.shared
        x = self._wide(heads, case.size)
        b, c = (self._wide(case.heads, case.state_size) for _ in range(2))
        rows = self._rows(heads, (case.size, case.state_size), torch.float32)
        limits = {"dt_limits": (0.3, 0.9)} if "limits" in options else {}
        arguments = [x, self._steps(heads), -self._uniform(heads, most=2.0), b, c]
        return StateCall(arguments, rows, self._skips(heads) | limits)

    def _gated_delta(self) -> StateCall:
        case, options = self.case, self.case.options
        heads = case.heads * case.shared
        shrunk = 1.0 if "normalize" in options else case.size**-0.5
        query, key = (shrunk * self._wide(case.heads, case.size) for _ in range(2))
        key[1::5] = key[:1]  # the earlier state
        elements = (case.size,) if "elements" in options else ()
        g = -self._uniform(self.tokens, heads, *elements)
        g[::7] *= 100
        beta = self._uniform(self.tokens, heads, most=2.0).to(case.dtype)
        rows = self._rows(heads, (case.size, case.state_size), torch.float32)
        value = self._wide(heads, case.state_size)
        choices = {"scale": case.size**-0.5, "normalize": "normalize" in options}
        return StateCall([query, key, value, g, beta], rows, choices)

    def _selective_scan(self) -> StateCall:
        case = self.case
        x, dt = self._wide(case.size), self._steps(case.size)
        b, c = (self._wide(case.state_size) for _ in range(2))
        rows = self._rows(
            -(-case.size // case.per_row), (case.per_row, case.state_size), torch.float32
        )
        a = -self._uniform(case.size, case.state_size, most=2.0)
        return StateCall([x, dt, a, b, c], rows, self._skips(case.size))

    def _steps(self, count: int) -> torch.Tensor:
        if "softplus" in self.case.options:
            return 4 * self._wide(count)
        return self._uniform(self.tokens, count).to(self.case.dtype)

    def _skips(self, count: int) -> dict[str, Any]:
        options = self.case.options
        return {
            "d": self._normal(count) if "d" in options else None,
            "dt_bias": self._uniform(count).to(self.case.dtype) if "dt_bias" in options else None,
            "dt_softplus": "softplus" in options,
        }

    def _normal(self, *shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=self.generator)
        return numbers.to(self.case.dtype).to(self.device)

    def _uniform(self, *shape: int, most: float = 1.0) -> torch.Tensor:
        return most * torch.rand(shape, generator=self.generator).to(self.device)

    def _wide(self, *shape: int) -> torch.Tensor:
        """Return a slice of each token, as from a fused projection."""
        size = math.prod(shape)
        fused = self._normal(self.tokens, size + 5)
        return fused[:, 3 : 3 + size].view(self.tokens, *shape)

    def _rows(self, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> StateRows:
        """Return rows in a cache that is NaN except for old sequences' states."""
        case, shuffled = self.case, random.Random(self.case.seed)
        per_block, seqs = case.rows_per_block, len(case.lengths)
        width = -(-(case.first_row + count) // per_block)
        num_blocks = seqs * width + 2
        size = per_block * math.prod(shape) + 3
        room = torch.full((num_blocks * size,), math.nan, dtype=dtype)
        state = room.as_strided(
            (num_blocks, per_block, *shape),
            (size, math.prod(shape), *torch.empty(shape).stride()),
        )
        blocks = shuffled.sample(range(num_blocks), num_blocks)
        tables = torch.tensor(blocks[: seqs * width], dtype=torch.int32).view(seqs, width)
        for (queries, tokens), table in zip(case.lengths, tables.tolist(), strict=True):
            for row in range(case.first_row, case.first_row + count):
                if queries < tokens:
                    numbers = torch.randn(shape, generator=self.generator)
                    state[table[row // per_block], row % per_block] = numbers.to(dtype)
        for seq, (_, tokens) in enumerate(case.lengths):
            if not tokens:
                tables[seq] = num_blocks + 7  # padding: it is not looked up
        queries = [queries for queries, _ in case.lengths]
        starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seq_lens = torch.tensor([tokens for _, tokens in case.lengths], dtype=torch.int32)
        tensors = (tables, starts, seq_lens)
        tables, starts, seq_lens = (tensor.to(self.device) for tensor in tensors)
        moved = _copy(state).to(self.device) if self.device != "cpu" else state
        return StateRows(moved, case.first_row, tables, starts, seq_lens, max(queries))


@dataclass
class Steps:
    """One sequence that an operation of `octavo.kernels.states` computes in pieces.

    Attributes:
        operation: Its name.
        row_shape: Shape of the state's rows.
        count: The number of rows.
        dtype: Type of the rows.
    """

    operation: str
    row_shape: tuple[int, ...]
    count: int
    dtype: torch.dtype = torch.float32

    def run(
        self, cuts: list[int], arguments: list[Any], options: dict[str, Any], per_token: set[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results and the state, `[count, *row_shape]`.

        Args:
            cuts: The number of tokens of each call.
            arguments: The arguments before the rows.
            options: The arguments after the rows.
            per_token: The indices of the arguments with a token dimension.
        """
        state = torch.full((1, self.count, *self.row_shape), math.nan, dtype=self.dtype)
        table = torch.zeros((1, 1), dtype=torch.int32)
        results, done = [], 0
        for tokens in cuts:
            lengths = torch.tensor([0, tokens], dtype=torch.int32)
            total = torch.tensor([done + tokens], dtype=torch.int32)
            rows = StateRows(state, 0, table, lengths, total, tokens)
            given = [
                argument[done : done + tokens] if index in per_token else argument
                for index, argument in enumerate(arguments)
            ]
            results.append(getattr(states, self.operation)(*given, rows, **options))
            done += tokens
        return torch.cat(results), state[0]
