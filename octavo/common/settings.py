"""Settings: each field is a flag, an environment variable and a TOML key."""

import json
import os
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.sources import InitSettingsSource

ENV_PREFIX = "OCTAVO_"
TABLES = ("engine", "router", "serve")
"""TOML tables for one command each; their keys override the file's top-level keys."""


class SettingsError(Exception):
    """A setting is invalid; the message says where it was set and what is allowed."""


class Settings(BaseSettings):
    """Settings of all commands, which router and engine settings extend.

    Precedence: flags, environment (`OCTAVO_NAME`; lists are comma-separated or JSON), the TOML file
    of `config` or `OCTAVO_CONFIG`, the field's default. Flags and environment variables hold tables
    as JSON.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        enable_decoding=False,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
    )

    table: ClassVar[str] = ""
    """TOML table of this class: one of `TABLES`, or none."""
    former_names: ClassVar[dict[str, str]] = {}
    """Field names of the previous version, still accepted, with the current names."""

    config: Path | None = Field(
        None,
        description="TOML file of settings; flags and environment variables override it.",
    )
    log_format: Literal["console", "json"] = Field(
        "console",
        description="Log format: console: readable text, json: one JSON object per line.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Minimum severity of log lines; less severe lines are dropped."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _decode(cls, value: object, info: ValidationInfo) -> object:
        """Parse lists and tables given as strings."""
        field = cls.model_fields[info.field_name or ""]
        if not isinstance(value, str) or not is_collection(field):
            return value
        if is_table(field) or value.lstrip()[:1] == "[":
            try:
                return json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"is not valid JSON: {error}") from None
        return [part.strip() for part in value.split(",") if part.strip()]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Add the TOML file, below the environment."""
        flags = init_settings() if isinstance(init_settings, InitSettingsSource) else {}
        path = flags.get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
        toml = read_toml(Path(path), cls) if path else {}
        former = {
            name: os.environ[variable(old)]
            for old, name in cls.former_names.items()
            if os.environ.get(variable(old))
        }
        others = InitSettingsSource(settings_cls, init_kwargs={**toml, **former})
        return init_settings, env_settings, others

    @classmethod
    def field_name(cls, key: str) -> str:
        """Return the field of a key, which may be a flag's spelling or a former name."""
        name = key.replace("-", "_")
        return cls.former_names.get(name, name)

    @classmethod
    def has(cls, key: str) -> bool:
        """Return whether a key, which may be a former name, is one of its fields."""
        return cls.field_name(key) in cls.model_fields

    @classmethod
    def load(cls, **flags: object) -> Self:
        """Load settings from flags and all other sources.

        Args:
            **flags: Values by field name; None means "not given".

        Raises:
            SettingsError: A value is invalid; the message names the flag, environment variable or
                TOML key.
        """
        set_flags = {
            cls.field_name(name): value for name, value in flags.items() if value is not None
        }
        try:
            return cls(**cast("dict[str, Any]", set_flags))
        except ValidationError as error:
            lines = [_explain(cls, details, set_flags) for details in error.errors()]
            raise SettingsError("\n".join(lines)) from None


def read_toml(path: Path, cls: type[Settings]) -> dict[str, Any]:
    """Return a file's values for `cls`: top-level keys, overridden by those of its table.

    Top-level keys of other commands are ignored, so that all commands can share a file.

    Raises:
        SettingsError: The file is missing or invalid, or the table has an unknown key.
    """
    data = parse_toml(path, "--config")
    tables = {name: data.pop(name) for name in TABLES if isinstance(data.get(name), dict)}
    of_table = {cls.field_name(key): value for key, value in tables.get(cls.table, {}).items()}
    unknown = sorted(of_table.keys() - cls.model_fields.keys())
    if unknown:
        raise SettingsError(f"{path}: [{cls.table}] has no key {unknown[0]!r}")
    flat = {cls.field_name(key): value for key, value in data.items()}
    known = {name: value for name, value in flat.items() if name in cls.model_fields}
    return {**known, **of_table}


def parse_toml(path: Path, flag: str) -> dict[str, Any]:
    """Read the TOML file that `flag` sets.

    Raises:
        SettingsError: The file is missing or not valid TOML.
    """
    try:
        return tomllib.loads(path.expanduser().read_text())
    except OSError as error:
        raise SettingsError(f"cannot read {path} ({flag}): {error.strerror}") from None
    except RecursionError:
        raise SettingsError(f"{path} ({flag}) nests arrays or tables too deeply") from None
    except ValueError as error:  # TOML, UTF-8, or an integer with too many digits for Python
        raise SettingsError(f"{path} ({flag}) is not valid TOML: {error}") from None


def flag(name: str) -> str:
    """Return the command-line flag of the field `name`."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """Return the environment variable of the field `name`."""
    return ENV_PREFIX + name.upper()


def is_collection(field: FieldInfo) -> bool:
    """Return whether a field holds a list, set, tuple or table."""
    return any(
        typing.get_origin(arm) in {list, set, frozenset, tuple, dict}
        for arm in arms(field.annotation)
    )


def is_table(field: FieldInfo) -> bool:
    """Return whether a field holds a table."""
    return any(typing.get_origin(arm) is dict for arm in arms(field.annotation))


def arms(annotation: object) -> tuple[object, ...]:
    """Return a union's members, or the type itself if it is not a union."""
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        return typing.get_args(annotation)
    return (annotation,)


def _explain(cls: type[Settings], details: ErrorDetails, flags: dict[str, object]) -> str:
    """Describe an error in one line: the source, the problem, the given value."""
    if not details["loc"]:  # a rule over several fields, whose message names them
        return details["msg"].removeprefix("Value error, ")
    name = str(details["loc"][0])
    what = details["msg"].removeprefix("Value error, ")
    if details["type"] == "missing":
        return f"{flag(name)} is required (or {variable(name)}, or the TOML key {name!r})"
    if details["type"] == "extra_forbidden":
        return f"{cls.__name__} has no setting {name!r}"
    if name in flags:
        where = flag(name)
    else:
        names = [name, *(old for old, field in cls.former_names.items() if field == name)]
        variables = [variable(each) for each in names if os.environ.get(variable(each))]
        where = variables[0] if variables else f"TOML key {name!r}"
    if SecretStr in arms(cls.model_fields[name].annotation):
        return f"{where}: {what}"
    return f"{where}: {what} (given: {details['input']!r})"
