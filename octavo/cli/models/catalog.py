"""The models that `octavo serve` may load, from the command line or a TOML file."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from octavo.cli.options import Flags
from octavo.cli.preflight import check_model
from octavo.cli.serve_settings import ServeSettings
from octavo.common.models.gguf.reader import parts_of
from octavo.common.models.hub_gguf import by_model
from octavo.common.models.json_files import CONFIG
from octavo.common.models.safetensors_files import weight_files
from octavo.common.settings import SettingsError, parse_toml
from octavo.engine.settings import EngineSettings

FIXED = frozenset({"host", "port", "served_model_name", "config"})
"""Engine settings that a model's table cannot change."""
MAX_CACHE_MEMORY = 4.0
"""Maximum default size of a model's KV cache, in GiB; else an eighth of the memory."""
OVERHEAD = 700 << 20
"""Bytes of an engine's process beside weights and KV cache: code, buffers, activations."""
WEIGHTS_SHARE = 1.25
"""Maximum memory of packed weights while they are loaded, relative to their files."""


class _OwnKeys(BaseModel, strict=True):
    """Keys of a model's table that are no settings of its engine."""

    aliases: list[Annotated[str, Field(min_length=1)]] = []
    pin: bool = False
    idle_timeout: float = Field(0.0, ge=0)


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model that may be loaded.

    Attributes:
        name: Name in requests and answers.
        aliases: Other names in requests.
        settings: Settings of its engine.
        pinned: Whether it is loaded at the start and never unloaded.
        idle_timeout: Seconds without requests after which it is unloaded; 0: none.
    """

    name: str
    aliases: tuple[str, ...]
    settings: EngineSettings
    pinned: bool
    idle_timeout: float

    def memory(self) -> int:
        """Return an upper estimate of the memory that its engine needs, in bytes.

        A model of the hub is downloaded.

        Raises:
            ModelError: The model does not exist, or cannot be served.
            OSError: A file cannot be opened.
        """
        path = check_model(self.settings)
        files = parts_of(path) if path.is_file() else weight_files(path)
        weights = WEIGHTS_SHARE * sum(each.stat().st_size for each in files)
        if self.settings.dtype == "float32":
            weights *= 2  # most files have 16 bits
        tables = (self.settings.cache_memory or 0.0) + (self.settings.swap_space or 0.0)
        return int(weights + tables * 2**30) + OVERHEAD


def read_catalog(
    settings: ServeSettings, names: Sequence[str], shared: Flags, limit: int
) -> list[CatalogModel]:
    """Return the models to serve, from --models, from --models-dir or from the command line.

    Args:
        settings: The file or the directory, and the default of `idle_timeout`.
        names: Models named on the command line.
        shared: Engine settings of all models.
        limit: Maximum memory of all loaded models together, in bytes.

    Raises:
        SettingsError: A setting or the file is invalid, or two models have a name in common.
    """
    given = {
        "as arguments": names,
        "by --models": settings.models,
        "by --models-dir": settings.models_dir,
    }
    if len(ways := [way for way, value in given.items() if value]) > 1:
        raise SettingsError(f"models are given {' and '.join(ways)}; use one of them")
    tables: dict[str, dict[str, Any]] = {name: {} for name in names}
    where = ""
    if settings.models is not None:
        where, tables = f"{settings.models} (--models): ", _read_tables(settings.models)
    elif settings.models_dir is not None:
        where = f"{settings.models_dir} (--models-dir): "
        tables = _tables_of(settings.models_dir)
    if len(names) > len(tables):
        raise SettingsError("a model is named twice")
    models = []
    for name, table in tables.items():
        try:
            models.append(_model(name, table, shared, settings.idle_timeout, limit))
        except SettingsError as error:
            raise SettingsError(f"{where}model {name!r}: {error}") from None
    if doubled := _doubled(models):
        raise SettingsError(f"{where}the name {doubled!r} is used twice")
    return models


def _read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """Read a file's table `[models.NAME]` for each model.

    Raises:
        SettingsError: The file is missing or invalid.
    """
    content = parse_toml(path, "--models")
    tables = content.pop("models", None)
    if content:
        raise SettingsError(f"{path} (--models) has the key {min(content)!r} outside of a model")
    if not isinstance(tables, dict) or not tables:
        raise SettingsError(f"{path} (--models) has no table of a model, such as [models.demo]")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SettingsError(f"{path} (--models): models.{name} is not a table")
    return tables


def _tables_of(directory: Path) -> dict[str, dict[str, Any]]:
    """Return a table for each GGUF file and each directory of a model in a directory.

    Raises:
        SettingsError: There is none, or the directory cannot be read.
    """
    try:
        found = {path.name: path for path in directory.iterdir()}
    except OSError as error:
        raise SettingsError(f"{directory} (--models-dir): {error.strerror}") from None
    files = by_model(name for name, path in found.items() if path.is_file())
    paths = {stem: found[names[0]] for stem, names in files.items()}
    paths |= {name: path for name, path in found.items() if (path / CONFIG).is_file()}
    if not paths:
        raise SettingsError(f"{directory} (--models-dir) contains neither a GGUF file nor a model")
    return {name: {"model": str(path.absolute())} for name, path in sorted(paths.items())}


def _model(
    name: str, table: dict[str, Any], shared: Flags, idle_timeout: float, limit: int
) -> CatalogModel:
    """Return the model of a table.

    Raises:
        SettingsError: A value is not allowed.
    """
    fields = _OwnKeys.model_fields.keys()
    engine = {EngineSettings.field_name(key): table[key] for key in table.keys() - fields}
    if wrong := FIXED & engine.keys():
        raise SettingsError(f"{min(wrong)} cannot be set for one model")
    if unknown := engine.keys() - EngineSettings.model_fields.keys():
        raise SettingsError(f"there is no setting {min(unknown)!r}")
    try:
        own = _OwnKeys(
            **{"idle_timeout": idle_timeout, **{key: table[key] for key in fields & table.keys()}}
        )
    except ValidationError as error:
        details = error.errors()[0]
        raise SettingsError(f"{details['loc'][0]}: {details['msg']}") from None
    settings = EngineSettings.load(
        **{"model": name, "metrics_port": 0, **shared, **engine},
        served_model_name=[name],
        host="127.0.0.1",
    )
    unset = {
        "cache_memory": min(limit / 2**30 / 8, MAX_CACHE_MEMORY),
        "swap_space": 0.0,
        **dict.fromkeys(("tls_cert", "tls_key", "tls_client_ca")),
    }
    given = settings.model_fields_set & {"cache_memory", "swap_space"}
    return CatalogModel(
        name=name,
        aliases=tuple(own.aliases),
        settings=settings.model_copy(
            update={key: value for key, value in unset.items() if key not in given}
        ),
        pinned=own.pin,
        idle_timeout=own.idle_timeout,
    )


def _doubled(models: Sequence[CatalogModel]) -> str | None:
    """Return a name that two models, aliases or adapters have; None if there is none."""
    names = Counter(
        name for model in models for name in (model.name, *model.aliases, *model.settings.adapters)
    )
    return next((name for name, count in names.items() if count > 1), None)
