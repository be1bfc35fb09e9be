"""Request parameters as options of `octavo generate` and `octavo chat`."""

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, cast, get_args, get_origin

import typer

from octavo.cli.signature import expand
from octavo.client import GenerateOptions
from octavo.common.sampling_parameters import PARAMETERS, TYPES, Parameter

FLAGS = tuple(name for name, parameter in PARAMETERS.items() if parameter.flags != ())
"""Names of the parameters that have flags."""


def with_options(
    names: Collection[str] = FLAGS,
    defaults: Mapping[str, object] | None = None,
    fallbacks: Mapping[str, float] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `options` with flags for request parameters.

    Args:
        names: Names of the parameters.
        defaults: The command's default values.
        fallbacks: Values to use if neither the flag nor the model sets one.
    """
    own_defaults, last = defaults or {}, fallbacks or {}
    shown = [
        _option(name, PARAMETERS[name], own_defaults.get(name), last.get(name)) for name in names
    ]
    return lambda command: expand(command, "options", shown, _options)


def _options(**given: object) -> GenerateOptions:
    """Return the options that were set."""
    chosen = {name: value for name, value in given.items() if value not in (None, [])}
    chosen = {name: value for name, value in chosen.items() if value is not False}
    return cast("GenerateOptions", {name: _read(name, value) for name, value in chosen.items()})


def _read(name: str, value: Any) -> object:  # noqa: ANN401 - file or parameter type
    """Return a flag's value, read from a file if it takes one.

    Raises:
        typer.BadParameter: The file is not text, or not the expected JSON.
    """
    if not PARAMETERS[name].file:
        return value
    try:
        text = value.read()
        return json.loads(text) if name == "tools" else text
    except ValueError as error:
        flag = PARAMETERS[name].shown_flags(name)[0]
        raise typer.BadParameter(f"{flag} {value.name}: {error}") from None


def _option(
    name: str, parameter: Parameter, default: object, fallback: float | None
) -> inspect.Parameter:
    """Return the typer option of one parameter."""
    option = typer.Option(
        *parameter.shown_flags(name),
        help=describe(parameter, default, fallback),
        metavar="FILE" if parameter.file else None,
        rich_help_panel="Generation",
    )
    arms = get_args(TYPES[name])
    kind: Any = TYPES[name]
    if bool in arms:
        kind, default = bool, False
    elif parameter.file:
        kind = typer.FileText | None
    elif any(get_origin(arm) is Sequence for arm in arms):
        kind = list[str] | None
    elif str in arms:
        kind = str | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def describe(parameter: Parameter, default: object = None, fallback: float | None = None) -> str:
    """Return a parameter's help with its range and, unless typer shows it, its default.

    Args:
        parameter: The parameter.
        default: The command's default value, which typer shows beside the help.
        fallback: The command's default that replaces the parameter's.
    """
    text = parameter.help
    if parameter.range is not None:
        text += f" Range {parameter.range}."
    last = parameter.default if fallback is None else fallback
    if default is None and last is not None:
        default_source = ": the model's, else" if parameter.generation_config else ""
        text += f" Default{default_source} {last:g}."
    return text.replace("[", "\\[")
