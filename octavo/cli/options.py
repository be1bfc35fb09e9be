"""Command options for the fields of settings classes."""

import inspect
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from octavo.cli.signature import make_like
from octavo.common.settings import Settings, SettingsError, arms, flag, is_collection, is_table

Flags = dict[str, Any]
"""Values given on the command line, by field name."""

ARGUMENT = "argument"
"""Parameter name of a field that may be an argument instead of a flag."""

S = TypeVar("S", bound=Settings)

EPILOG = (
    "Every option is also an environment variable (--block-size: OCTAVO_BLOCK_SIZE) and a key "
    "of the TOML file (block_size), flat or under \\[engine], \\[router] or \\[serve]. A flag "
    "overrides the variable, the variable overrides the file."
)


def settings_options(
    *classes: type[Settings], hidden: Collection[str] = (), positional: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of `classes`, beside its own.

    The command's first parameter receives the values. If two classes share a field, the first
    class's is used. `load` validates the values together with the environment and the TOML file.

    Args:
        *classes: Settings classes.
        hidden: Fields without an option.
        positional: Field that may also be the command's argument.
    """
    fields: dict[str, tuple[FieldInfo, str]] = {}
    former: list[inspect.Parameter] = []
    for cls in classes:
        former += [_former(old, cls.model_fields[name]) for old, name in cls.former_names.items()]
        for name, field in cls.model_fields.items():
            if name not in hidden:
                panel = declaring(cls, name).table or "common"
                fields.setdefault(name, (field, panel))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own_parameters = inspect.signature(command).parameters.values()

        def run(**flags: Any) -> None:  # noqa: ANN401 - typer's values
            others = {parameter.name: flags.pop(parameter.name) for parameter in own_parameters}
            if positional is not None:
                flags[positional] = given_once(positional, flags.pop(ARGUMENT), flags[positional])
            set_flags = {name: value for name, value in flags.items() if value not in (None, [])}
            command(set_flags, **others)

        # A field's current name is last, so that it wins over former names.
        parameters = [*former, *(_parameter(name, *fields[name]) for name in fields)]
        parameters += [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own_parameters
        ]
        if positional is not None:
            parameters.insert(0, _argument(positional))
        make_like(run, parameters, command)
        return run

    return decorate


def load(cls: type[S], flags: Flags) -> S:
    """Return settings of class `cls`, with the flags for its fields.

    Raises:
        typer.BadParameter: A value is not allowed; the message names its source.
    """
    try:
        return cls.load(**{name: flags[name] for name in flags if cls.has(name)})
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None


def _argument(name: str) -> inspect.Parameter:
    """Return the typer argument that sets the same field as option `name`."""
    shown = typer.Argument(
        metavar=name.upper(), help=f"The same as {flag(name)}.", show_default=False
    )
    return inspect.Parameter(
        ARGUMENT,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, shown],
    )


def given_once(name: str, argument: str | None, option: str | None) -> str | None:
    """Return the value of a field that has an argument and an option.

    Raises:
        typer.BadParameter: Both are given and differ.
    """
    if argument is not None and option is not None and argument != option:
        raise typer.BadParameter(
            f"the {name} is given twice: {argument!r} and {flag(name)} {option!r}; give one of them"
        )
    return option if argument is None else argument


def declaring(cls: type[Settings], name: str) -> type[Settings]:
    """Return the class that declares a field: `cls` or a base class."""
    bases = (base for base in reversed(cls.__mro__) if issubclass(base, Settings))
    return next(base for base in bases if name in base.model_fields)


def describe(field: FieldInfo) -> tuple[str, str]:
    """Return a field's type and default as text."""
    kinds = [_kind(arm) for arm in arms(field.annotation) if arm is not type(None)]
    if field.default_factory is not None or field.default in (None, {}, PydanticUndefined):
        default = ""
    elif isinstance(field.default, list):
        default = ", ".join(map(str, field.default))
    elif isinstance(field.default, bool):
        default = "on" if field.default else "off"
    else:
        default = str(field.default)
    return "|".join(kinds), default


def _parameter(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    """Return the typer option of one field; its default None means "not given"."""
    kind, default = describe(field)
    help_text = (field.description or "").replace("[", "\\[")
    if field.is_required():
        help_text += " \\[required]"
    elif default:
        help_text += f" \\[default: {default}]"
    if field.annotation is bool:
        declaration, annotation, metavar = f"{flag(name)}/--no-{flag(name)[2:]}", bool | None, ""
    else:
        repeated = is_collection(field) and not is_table(field)
        annotation = list[str] | None if repeated else str | None  # type: ignore[assignment]
        declaration, metavar = flag(name), kind.upper() if "|" not in kind else f"[{kind}]"
    option = typer.Option(
        declaration,
        help=help_text,
        metavar=metavar,
        show_default=False,
        rich_help_panel=f"{panel.capitalize()} options",
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[annotation, option],
    )


def _former(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the hidden option of a field's former name."""
    parameter = _parameter(name, field, "")
    shown = typing.get_args(parameter.annotation)[1]
    shown.hidden = True
    return parameter


def _kind(annotation: object) -> str:
    """Return a type's name for --help."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return "|".join(str(choice) for choice in typing.get_args(annotation))
    if origin is dict:
        return "JSON"
    if origin is Annotated:
        return _kind(typing.get_args(annotation)[0])
    if origin is not None and typing.get_args(annotation):
        return _kind(typing.get_args(annotation)[0])
    names = {int: "integer", float: "number", str: "text", SecretStr: "text", bool: "on|off"}
    return names.get(annotation, getattr(annotation, "__name__", "value").lower())  # type: ignore[call-overload,no-any-return]
