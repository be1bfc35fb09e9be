"""Command parameters that are combined from several options."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any


def expand(
    command: Callable[..., None],
    name: str,
    options: Iterable[inspect.Parameter],
    make: Callable[..., object],
) -> Callable[..., None]:
    """Return a command with `options` instead of its parameter `name`.

    Args:
        command: A typer command.
        name: Parameter to replace.
        options: Options that replace the parameter, placed last.
        make: Returns the parameter's value from the options' values.
    """
    options = list(options)
    parameters = inspect.signature(command).parameters.values()
    shown = [*(p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.name != name), *options]

    def run(**given: Any) -> None:  # noqa: ANN401 - typer's values
        value = make(**{option.name: given.pop(option.name) for option in options})
        command(**{name: value}, **given)

    make_like(run, shown, command)
    return run


def make_like(
    run: Callable[..., None], parameters: Iterable[inspect.Parameter], command: Callable[..., Any]
) -> None:
    """Make `run` look like `command` with `parameters` to typer."""
    run.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
