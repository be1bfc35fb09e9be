"""The adapters on the device: the next batch's adapters evict the least recently used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from octavo.engine.lora.adapter import Adapter
from octavo.kernels.host_copies import to_device
from octavo.kernels.low_rank import LowRankLayer, StepAdapters, sort_rows


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """An adapter's matrices on the device, and the records of their addresses."""

    matrices: torch.Tensor
    records: np.ndarray


class DeviceAdapters:
    """Copies adapters to the device when a batch needs them, within a limit.

    All adapters are in host memory, pinned if the device is a GPU. Copies to the device and reuse
    of freed memory follow the stream's order, so a launched step keeps its adapters. On a CPU
    nothing is copied. An adapter without references is dropped automatically.

    Attributes:
        limit: See the arguments.
        copies: Number of copies to the device so far.

    Args:
        device: The model's device.
        limit: Maximum bytes on the device, which must fit the adapters of a batch; None: nothing is
            copied, as the model is on a CPU.
        packed: The model's packed layers that adapters adapt.
    """

    def __init__(
        self, device: torch.device, limit: int | None, packed: Sequence[LowRankLayer] = ()
    ) -> None:
        self._device = device
        self.limit = limit
        self._packed = packed
        self.copies = 0
        # Least recently used first.
        self._held: WeakKeyDictionary[Adapter, _OnDevice] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of the adapters on the device."""
        return sum(held.matrices.nbytes for held in self._held.values())

    def lay_out(
        self, spans: Sequence[tuple[object, int]], logit_rows: np.ndarray
    ) -> StepAdapters | None:
        """Return the adapters of a batch; None if no sequence has one.

        Args:
            spans: Each sequence's adapter and its tokens in the batch, in their order.
            logit_rows: `[num_rows]` int64, the tokens whose logits are needed.
        """
        numbers: dict[Adapter, int] = {}
        for adapter, _ in spans:
            if isinstance(adapter, Adapter):
                numbers.setdefault(adapter, len(numbers))
        if not numbers:
            return None
        held = self._hold(numbers)
        of_spans = [
            numbers[adapter] if isinstance(adapter, Adapter) else -1 for adapter, _ in spans
        ]
        of_tokens = np.repeat(of_spans, [count for _, count in spans])
        records = np.stack([adapter_copy.records for adapter_copy in held], axis=1)
        stacked = to_device(records, self._device)
        owners = [adapter_copy.matrices for adapter_copy in held]
        most = max(adapter.weights.max_rank for adapter in numbers)
        tokens, logits = (
            sort_rows(rows, stacked, most, owners) for rows in (of_tokens, of_tokens[logit_rows])
        )
        return StepAdapters(tokens, logits, self._packed)

    def _hold(self, wanted: Mapping[Adapter, int]) -> list[_OnDevice]:
        """Return adapters on the device; evict others to make room for them."""
        held = []
        for adapter in wanted:
            if (on_device := self._held.pop(adapter, None)) is None:
                self._make_room(adapter.nbytes, wanted)
                on_device = self._copy(adapter)
            self._held[adapter] = on_device
            held.append(on_device)
        return held

    def _make_room(self, nbytes: int, wanted: Mapping[Adapter, int]) -> None:
        if self.limit is None:
            return
        for adapter in list(self._held):
            if self.nbytes + nbytes <= self.limit:
                return
            if adapter not in wanted:
                del self._held[adapter]

    def _copy(self, adapter: Adapter) -> _OnDevice:
        weights = adapter.weights
        matrices = weights.matrices
        if self.limit is not None:
            matrices = matrices.to(self._device, non_blocking=True, copy=True)
            self.copies += 1
        return _OnDevice(matrices, weights.records_at(matrices.data_ptr()))
