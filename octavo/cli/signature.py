"""Command parameters that are made from several options."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any


def expand(
    command: Callable[..., None],
    name: str,
    options: Iterable[inspect.Parameter],
    make: Callable[..., object],
) -> Callable[..., None]:
    """Return a command with `options` in place of its parameter `name`.

    Args:
        command: A typer command.
        name: One of its parameters.
        options: The parameters that replace it, placed last.
        make: Returns the value of the parameter from those of `options`.
    """
    options = list(options)
    parameters = inspect.signature(command).parameters.values()
    shown = [*(p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.name != name), *options]

    def run(**given: Any) -> None:  # noqa: ANN401 - whatever typer parsed
        value = make(**{option.name: given.pop(option.name) for option in options})
        command(**{name: value}, **given)

    make_like(run, shown, command)
    return run


def make_like(
    run: Callable[..., None], parameters: Iterable[inspect.Parameter], command: Callable[..., Any]
) -> None:
    """Make `run` look to typer like `command` with `parameters`."""
    run.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
