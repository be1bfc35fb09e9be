"""Modules of the package's extras that commands need."""

from importlib.util import find_spec

import typer

from octavo.cli.output import err

MODULES = {
    "bench": ("httpx2", "numpy", "uvloop"),
    "engine": ("accelerate", "gguf", "grpc_reflection", "torch", "transformers", "uvloop"),
    "ray": ("ray",),
    "router": ("grpc_reflection", "jinja2", "starlette", "transformers", "uvicorn", "uvloop"),
}
"""Modules whose presence shows that an extra of pyproject.toml is installed."""

USAGE_ERROR = 2


def require(command: str, *extras: str) -> None:
    """Check that `extras` are installed.

    Raises:
        typer.Exit: A module is missing; the pip command is printed.
    """
    needed = dict.fromkeys(module for extra in extras for module in MODULES[extra])
    missing = [module for module in needed if find_spec(module) is None]
    if missing:
        name = extras[0] if len(extras) == 1 else "all"
        err.print(
            f"[bold red]error[/]: octavo {command} needs {', '.join(missing)}: "
            f"pip install 'octavo\\[{name}]'",
            soft_wrap=True,
        )
        raise typer.Exit(USAGE_ERROR)
