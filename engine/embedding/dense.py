"""Reads the linear layers that follow a checkpoint's pooling."""

from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.common.models.json_files import CONFIG, read_json

WEIGHTS = "model.safetensors"
ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.GELU": nn.GELU,
    "torch.nn.modules.linear.Identity": nn.Identity,
}
"""Activations by their names in configs."""


def read_dense(folder: Path, inputs: int) -> nn.Sequential:
    """Return a layer of sentence-transformers' class `Dense`, in float32.

    Args:
        folder: Its folder.
        inputs: The number of inputs that it must have.

    Raises:
        UnsupportedModelError: Octavo does not have its activation or its residual.
        ModelError: It does not fit, or a file is missing.
    """
    config = read_json(folder / CONFIG)
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{folder / CONFIG} has the activation {name}, and Octavo has"
            f" {', '.join(each.rpartition('.')[2] for each in ACTIVATIONS)}"
        )
    known = {"in_features", "out_features", "bias", "activation_function"}
    if other := sorted(key for key, value in config.items() if key not in known and value):
        raise UnsupportedModelError(
            f"{folder / CONFIG} sets {other[0]}, which Octavo does not know"
        )
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder} has no {WEIGHTS}: save its weights as safetensors")
    weights = load_file(folder / WEIGHTS)
    linear = nn.Linear(inputs, config["out_features"], bias="linear.bias" in weights)
    made = nn.Sequential(linear, ACTIVATIONS[name]())
    try:
        linear.load_state_dict({key.removeprefix("linear."): w for key, w in weights.items()})
    except RuntimeError as error:
        raise ModelError(f"{folder} does not fit {inputs} inputs: {error}") from error
    return made.float().eval().requires_grad_(False)
