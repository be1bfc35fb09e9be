"""The README's table of flags, made from the settings: `python -m tools.flag_table`."""

from pathlib import Path

from octavo.cli.options import declaring, describe
from octavo.common.connections import ConnectionSettings
from octavo.common.listening import TlsSettings
from octavo.common.settings import Settings, flag
from octavo.common.tracing import TracingSettings
from octavo.engine.settings import EngineSettings
from octavo.router.settings import RouterSettings
from tools.generated_part import MadePart

PLACE = MadePart(Path("README.md"), "flags", target="readme")
TITLES = (
    ("All three", Settings),
    ("All three, on the connections that they take", ConnectionSettings),
    ("All three, on TLS at their port", TlsSettings),
    ("All three, on traces", TracingSettings),
    ("`octavo router` and `octavo serve`", RouterSettings),
    ("`octavo engine` and `octavo serve`", EngineSettings),
)


def markdown() -> str:
    """The tables, one for each settings class, without what it inherits."""
    parts = []
    for title, cls in TITLES:
        rows = ["| flag | type | default | |", "| --- | --- | --- | --- |"]
        for name, field in cls.model_fields.items():
            if declaring(cls, name) is not cls:
                continue
            kind, default = describe(field)
            shown = flag(name)
            if field.annotation is bool:
                shown += f"`, `--no-{flag(name)[2:]}"
            default = "required" if field.is_required() else f"`{default}`" if default else ""
            kind = kind.replace("|", ", ")
            rows.append(f"| `{shown}` | {kind} | {default} | {field.description} |")
        parts.append(f"{title}:\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    PLACE.renew(markdown())
