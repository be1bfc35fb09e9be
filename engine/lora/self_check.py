"""Checks that a step applies adapters, with the trial adapter of `adapter_reference.py`."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.engine.lora.adapter import Adapter
from octavo.engine.lora.device_adapters import DeviceAdapters
from octavo.engine.lora.targets import Targets
from octavo.engine.lora.weights import Matrices, lay_out
from octavo.engine.models.checks.adapter_matrices import trial_matrices
from octavo.engine.models.checks.self_check import SelfCheck, SelfCheckError
from octavo.engine.models.forward import Forward
from octavo.engine.models.linear.adapted_layers import applying


class TrialForward:
    """A step that applies the trial adapter to all tokens.

    Args:
        forward: A step that applies adapters.
        targets: The model's layers that adapters may adapt.
        scales: The adapter's layers and their scales.
        device: The model's device.

    Raises:
        SelfCheckError: The trial adapter has a layer that adapters may not adapt.
    """

    def __init__(
        self, forward: Forward, targets: Targets, scales: Mapping[str, float], device: torch.device
    ) -> None:
        if unknown := sorted(set(scales) - set(targets.layers) - set(targets.elsewhere)):
            raise SelfCheckError(
                f"self-check failed: {unknown[0]} runs for every token, but takes no adapters"
            )
        self._forward = forward
        matrices = {
            name: trial_matrices(name, *targets.layers[name].sizes)
            for name in scales
            if name in targets.layers
        }
        layers = [
            Matrices(name, targets.layers[name], len(down), scales[name])
            for name, (down, _) in matrices.items()
        ]
        weights = lay_out(
            layers, lambda name, part: matrices[name][part == "B"].numpy(), targets, digest=""
        )
        self._adapter = Adapter("", Path(), weights)
        limit = None if device.type == "cpu" else self._adapter.nbytes
        self._held = DeviceAdapters(device, limit, targets.packed)

    def __call__(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        """Run the model within `attending`; see `octavo.engine.models.forward`."""
        rows: np.ndarray = logit_rows.cpu().numpy()
        with applying(self._held.lay_out([(self._adapter, token_ids.shape[1])], rows)):
            return self._forward(token_ids, positions, logit_rows)


def check_adapters(check: SelfCheck, forward: Forward) -> None:
    """Run the self-check with the trial adapter.

    Args:
        check: The check against transformers' forward pass with the adapter.
        forward: The step with a `TrialForward`.

    Raises:
        SelfCheckError: The logits differ.
    """
    try:
        check(forward)
    except SelfCheckError as error:
        raise SelfCheckError(f"with an adapter, {error}") from error
