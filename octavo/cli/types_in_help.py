"""Layout of --help and its type names, independent of typer's version."""

import enum
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from octavo.common.settings import arms

NAMES = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


class _Switches:
    """Commands whose --help shows no type for a switch, including --help itself."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - depends on typer's version
        """Return the parameters, with an empty type for each switch."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return parameters


class Command(_Switches, TyperCommand):
    """A command whose help has one line per paragraph, which the terminal wraps."""

    def __init__(self, *args: Any, help: str | None = None, **kwargs: Any) -> None:  # noqa: A002, ANN401
        paragraphs = inspect.cleandoc(help or "").split("\n\n")
        super().__init__(
            *args, help="\n\n".join(text.replace("\n", " ") for text in paragraphs), **kwargs
        )


class Group(_Switches, TyperGroup):
    """A command with sub-commands."""


def name_types(command: Callable[..., None]) -> Callable[..., None]:
    """Set the type names of a command's options; return the command."""
    for parameter in inspect.signature(command).parameters.values():
        kind, *marks = typing.get_args(parameter.annotation) or (None,)
        for mark in marks:
            if isinstance(mark, typer.models.OptionInfo) and mark.metavar is None:
                mark.metavar = _name(kind)
    return command


def _name(kind: object) -> str | None:
    """Return the name of an option's type, None to leave it to typer."""
    (kind, *others) = [arm for arm in arms(kind) if arm is not type(None)]
    if typing.get_origin(kind) is list and not others:
        (kind,) = typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"[{'|'.join(str(choice.value) for choice in kind)}]"
    return NAMES.get(kind)  # type: ignore[call-overload,no-any-return]
