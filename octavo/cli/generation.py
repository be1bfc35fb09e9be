"""Request parameters as options of `octavo generate` and `octavo chat`."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, cast, get_args

import typer

from octavo.cli.signature import expand
from octavo.client import GenerateOptions
from octavo.common.sampling_parameters import PARAMETERS, TYPES, Parameter

FLAGS = tuple(name for name, parameter in PARAMETERS.items() if parameter.flags != ())
"""Names of the parameters that have a flag."""


def with_options(
    names: Collection[str] = FLAGS, defaults: Mapping[str, object] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter `options` of a command by flags of request parameters.

    Args:
        names: The parameters.
        defaults: The command's own default values.
    """
    own = defaults or {}
    shown = [_option(name, PARAMETERS[name], own.get(name)) for name in names]
    return lambda command: expand(command, "options", shown, _options)


def _options(**given: object) -> GenerateOptions:
    """Return the options that were given."""
    chosen = {name: value for name, value in given.items() if value not in (None, [])}
    return cast("GenerateOptions", {n: v for n, v in chosen.items() if v is not False})


def _option(name: str, parameter: Parameter, default: object) -> inspect.Parameter:
    """Return the typer option of one parameter."""
    arms = get_args(TYPES[name])
    kind: Any = list[str] | None if len(arms) > 2 else TYPES[name]
    if bool in arms:
        kind, default = bool, False
    option = typer.Option(
        *parameter.shown_flags(name),
        help=describe(parameter, default),
        rich_help_panel="Generation",
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def describe(parameter: Parameter, default: object = None) -> str:
    """Return a parameter's help with its range, and with its default unless `default` is shown."""
    text = parameter.help
    if parameter.range is not None:
        text += f" Range {parameter.range}."
    if default is None and parameter.default is not None:
        text += f" Default {parameter.default:g}."
    return text.replace("[", "\\[")
