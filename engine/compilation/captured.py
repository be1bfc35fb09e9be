"""A captured step: all that the compiler needs of a model.

It can be saved for a process that does not load the model: ranks load and check theirs together,
in the engine's own processes, and compile apart.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.export import ExportedProgram

from octavo.engine.adapters.adapted_model import adapt_loaded
from octavo.engine.compilation.artifact import MANIFEST, REFERENCE, Manifest, Recipe
from octavo.engine.compilation.capture import capture
from octavo.engine.models.checks.reference import Reference
from octavo.engine.models.experts.packed_experts import count_packed
from octavo.engine.models.linear.adapted_layers import CapturedAdapters, applying
from octavo.engine.models.quantization.base import unquantized_shares
from octavo.engine.models.step import EagerStep, Step

if TYPE_CHECKING:
    from octavo.engine.models.load_model import LoadedModel

GRAPH = "step.pt2"


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step's graph, and what an artifact says of its model.

    Attributes:
        exported: The graph, for two tokens or more; also right for one, as tests show.
        manifest: The artifact's, without files.
        expected: What the self-check compares with.
        adapted: Likewise with the trial adapter, if it applies adapters.
    """

    exported: ExportedProgram
    manifest: Manifest
    expected: Reference
    adapted: Reference | None = None

    def save(self, directory: Path) -> None:
        """Write it to an empty directory; not one that applies adapters, as ranks take none."""
        assert self.adapted is None
        for weights in (self.exported.state_dict, self.exported.constants):
            for name, weight in weights.items():
                if isinstance(weight, torch.Tensor):
                    weights[name] = _alone(weight)
        torch.export.save(self.exported, directory / GRAPH)
        self.expected.save(directory / REFERENCE)
        self.manifest.write(directory / MANIFEST)

    @classmethod
    def load(cls, directory: Path) -> "CapturedStep":
        """Read what `save` wrote."""
        exported = torch.export.load(directory / GRAPH)
        expected = Reference.load(directory / REFERENCE)
        return cls(exported, Manifest.read(directory / MANIFEST), expected)


def _alone(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight that has all of its storage, as torch saves storages whole."""
    if weight.untyped_storage().nbytes() == weight.nbytes:
        return weight
    own = weight.detach().clone()
    is_parameter = isinstance(weight, torch.nn.Parameter)
    return torch.nn.Parameter(own, requires_grad=False) if is_parameter else own


@torch.no_grad()
def capture_step(
    loaded: "LoadedModel", recipe: Recipe, checked: Step | None = None
) -> CapturedStep:
    """Capture a loaded model's step.

    Args:
        loaded: The model, or this rank's part of it.
        recipe: What it was loaded by.
        checked: The step that passed the self-check, which returns the logits of all tokens.
            Default: the model's own.

    Raises:
        Exception: What torch raises for a model that it cannot capture.
    """
    step, check, trial = EagerStep(loaded.model), loaded.check, loaded.trial
    targets, adapted = adapt_loaded(loaded, recipe.model) if recipe.adapters else (None, None)
    with_adapter = None if trial is None else trial.check
    if count_packed(loaded.model) < len(check.expected.choices):
        check = check.follow(step if checked is None else checked)
        if with_adapter is not None and adapted is not None:
            with_adapter = with_adapter.follow(adapted)
    left = unquantized_shares(loaded.model) if recipe.quantization != "none" else {}
    manifest = Manifest(
        loaded.shape,
        str(loaded.dtype).removeprefix("torch."),
        str(loaded.cache_dtype).removeprefix("torch."),
        library="",
        files={},
        tolerance=check.tolerance,
        unquantized=left,
        targets=None if targets is None else targets.to_json(),
        trial={} if trial is None else trial.scales,
        kv_scales=loaded.kv_scales,
    )
    with applying(None if targets is None else CapturedAdapters()):
        exported = capture(step, loaded.device)
    of_adapters = None if with_adapter is None else with_adapter.expected
    return CapturedStep(exported, manifest, check.expected, of_adapters)
