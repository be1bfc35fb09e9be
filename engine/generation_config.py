"""Read a model's own sampling defaults from its generation_config.json.

transformers is not needed for it, so that a compiled model still starts without importing it.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from octavo.common.limits import Limits, check_sampling, check_stop
from octavo.common.rpc import RpcError
from octavo.common.sampling_parameters import PARAMETERS, Parameter
from octavo.v1 import sampling_pb2

NAME = "generation_config.json"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values of what a request does not set.

    Attributes:
        sampling: The sampling parameters; only those that the model has are set.
        max_tokens: Maximum tokens per output; None: as many as there is room for.
    """

    sampling: sampling_pb2.SamplingParams = field(default_factory=sampling_pb2.SamplingParams)
    max_tokens: int | None = None


def read(model: str, limits: Limits) -> Defaults:
    """Return a model's defaults; a value that no request may have is left out with a warning.

    `do_sample` is not read: transformers takes its absence for false, and models that are meant to
    be sampled often lack it.

    Args:
        model: A directory, or a hub name whose files are on this machine.
        limits: The limits of requests.
    """
    path = _find(model)
    if path is None:
        return Defaults()
    values = _values(path)
    messages: dict[str, Any] = {
        "sampling": sampling_pb2.SamplingParams(),
        "stop": sampling_pb2.StopConditions(),
    }
    used: dict[str, Any] = {}
    for parameter in PARAMETERS.values():
        key = parameter.generation_config
        if key is None or (value := values.get(key)) is None:
            continue
        try:
            _check(parameter, value, limits)
        except (TypeError, ValueError, RpcError) as error:
            log.warning("model's default not used", file=str(path), key=key, reason=str(error))
        else:
            setattr(messages[parameter.message], parameter.field, value)
            used[key] = value
    if used:
        log.info("model's defaults", file=str(path), **used)
    return Defaults(messages["sampling"], used.get("max_new_tokens"))


def _check(parameter: Parameter, value: object, limits: Limits) -> None:
    """Check a value as that of a request is checked.

    Raises:
        TypeError: It is not of the parameter's type.
        ValueError: It is too large for the parameter's type.
        RpcError: It is outside of the parameter's range.
    """
    if isinstance(value, bool):
        raise TypeError(f"{parameter.path} must be a number; got {json.dumps(value)}")
    alone: dict[str, Any] = {parameter.field: value}
    if parameter.message == "sampling":
        check_sampling(sampling_pb2.SamplingParams(**alone), limits)
    else:
        check_stop(sampling_pb2.StopConditions(**alone), limits)


def _values(path: Path) -> dict[str, Any]:
    """Return a file's values by key; none if it cannot be read."""
    try:
        values = json.loads(path.read_bytes())
        reason = "" if isinstance(values, dict) else "it is no JSON object"
    except (OSError, ValueError) as error:
        values, reason = None, str(error)
    if isinstance(values, dict):
        return values
    log.warning("model's defaults not used", file=str(path), reason=reason)
    return {}


def _find(model: str) -> Path | None:
    """Return the file of a model that has been loaded from this machine, if it has one."""
    if Path(model).is_dir():
        path = Path(model, NAME)
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - slow to import

    cached = try_to_load_from_cache(model, NAME)
    return Path(cached) if isinstance(cached, str) else None
