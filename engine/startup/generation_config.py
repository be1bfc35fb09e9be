"""Reads a model's own sampling defaults from its generation_config.json.

This does not need transformers, which is slow to import.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from octavo.common.limits import Limits, check_sampling, check_stop
from octavo.common.models.checkpoint import GENERATION_CONFIG
from octavo.common.models.json_files import read_json
from octavo.common.rpc import RpcError
from octavo.common.sampling_parameters import PARAMETERS, Parameter
from octavo.v1 import sampling_pb2

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values of parameters that a request does not set.

    Attributes:
        sampling: The sampling parameters; only those that the model has are set.
        max_tokens: Maximum tokens per output; None: as many as fit.
    """

    sampling: sampling_pb2.SamplingParams = field(default_factory=sampling_pb2.SamplingParams)
    max_tokens: int | None = None


def read(directory: Path, limits: Limits) -> Defaults:
    """Return a model's defaults; values outside requests' limits are dropped with a warning.

    `do_sample` is not read: transformers treats its absence as false, but models meant for sampling
    often lack it.

    Args:
        directory: The model's directory.
        limits: The limits of requests.

    Raises:
        ModelError: The file is damaged.
        OSError: It cannot be opened.
    """
    path = directory / GENERATION_CONFIG
    if not path.is_file():
        return Defaults()
    values = read_json(path)
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
    """Check a value in the same way as a request's.

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
