"""Options with several values, such as `--rate 1 2 4`, which typer lacks."""

from collections.abc import Sequence
from typing import Any

from octavo.cli.types_in_help import Command


class SeveralValues(Command):
    """A command whose repeatable options also take several values: `--rate 1 2 4`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's or typer's own copy of it
        """Repeat the option's name before each further value, then parse."""
        names = {
            name for option in self.params if getattr(option, "multiple", 0) for name in option.opts
        }
        return super().parse_args(ctx, repeat_names(args, names))


def repeat_names(arguments: Sequence[str], names: set[str]) -> list[str]:
    """Rewrite `--rate 1 2` to `--rate 1 --rate 2` for the options in `names`, up to a `--`."""
    repeated: list[str] = []
    name, has_value = "", False
    for position, argument in enumerate(arguments):
        if argument == "--":
            return [*repeated, *arguments[position:]]
        if argument.startswith("-") and argument != "-":
            option, equals, _ = argument.partition("=")
            name, has_value = (option if option in names else ""), bool(equals)
        elif name and has_value:
            repeated.append(name)
        else:
            has_value = True
        repeated.append(argument)
    return repeated
