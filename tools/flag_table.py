"""Write docs/flags.md, the reference of the flags, from the settings."""

from pathlib import Path

from octavo.cli.options import declaring, describe
from octavo.cli.serve import HIDDEN
from octavo.cli.serve_settings import ServeSettings
from octavo.common.connections import ConnectionSettings
from octavo.common.listening import TlsSettings
from octavo.common.settings import Settings, flag
from octavo.common.tracing_settings import TracingSettings
from octavo.engine.settings import EngineSettings
from octavo.router.settings import RouterSettings

TARGET = Path(__file__).parents[1] / "docs" / "flags.md"
TITLES = (
    ("`serve`, `router` and `engine`", Settings),
    ("`serve`, `router` and `engine`: connections", ConnectionSettings),
    ("`serve`, `router` and `engine`: TLS", TlsSettings),
    ("`serve`, `router` and `engine`: tracing", TracingSettings),
    ("`serve`", ServeSettings),
    ("`router` and `serve`", RouterSettings),
    ("`router`", RouterSettings),
    ("`engine` and `serve`", EngineSettings),
    ("`engine`", EngineSettings),
)
ONE_COMMAND = {
    "`router`": HIDDEN,
    "`engine`": RouterSettings.model_fields.keys() & EngineSettings.model_fields.keys(),
}
"""Fields without a flag of `serve`, or of which `serve` has the other class' flag."""

HEAD = """\
# Flags

<!-- Made from the settings by `make docs`. -->

Each flag of `octavo serve`, `octavo router` and `octavo engine` is also an environment variable
(`--block-size`: `OCTAVO_BLOCK_SIZE`) and a key of the TOML file that `--config` names
(`block_size`). A flag wins over the variable, the variable over the file. In the file, a key
outside of a table is for every command that has it; a key in `[engine]`, `[router]` or `[serve]`
is for one, and wins there.

The commands for clients have their flags in their `--help`: they find the server by `--address` or
`OCTAVO_ADDRESS` (default `localhost:50051`).

| variable without a flag | sets |
| --- | --- |
| `OCTAVO_CACHE_DIR` | Directory of prepared models and compiled kernels. Default: `octavo` in \
the user's cache directory. |
| `OCTAVO_MARCH` | CPU to compile kernels for, as the C++ compiler's `-march` names it, or \
`native`. Default: the wheel's kernels, else `native`. |
"""


def reference() -> str:
    """Return the text of docs/flags.md: a table for each class, without what it inherits."""
    parts = [HEAD]
    for title, cls in TITLES:
        rows = ["| flag | type | default | |", "| --- | --- | --- | --- |"]
        for name, field in cls.model_fields.items():
            if declaring(cls, name) is not cls or _title(cls, name, title) != title:
                continue
            kind, default = describe(field)
            shown = flag(name)
            if field.annotation is bool:
                shown += f"`, `--no-{flag(name)[2:]}"
            default = "required" if field.is_required() else f"`{default}`" if default else ""
            kind = kind.replace("|", ", ")
            rows.append(f"| `{shown}` | {kind} | {default} | {field.description} |")
        parts += [f"## {title}", "\n".join(rows)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _title(cls: type[Settings], name: str, title: str) -> str:
    """Return the title of the table that a field belongs to; `title` if there is no choice."""
    own = f"`{cls.table}`"
    if own not in ONE_COMMAND:
        return title
    shared = next(each for each, of in TITLES if of is cls and each != own)
    return own if name in ONE_COMMAND[own] else shared


if __name__ == "__main__":
    TARGET.write_text(reference())
