"""Write docs/parameters.md, the reference of a request's parameters, from their declarations."""

from pathlib import Path

from octavo.common.sampling_parameters import PARAMETERS, Parameter

TARGET = Path(__file__).parents[1] / "docs" / "parameters.md"

HEAD = """\
# Parameters of a request

<!-- Made from octavo/common/sampling_parameters.py by `make docs`. -->

The name is that of the Python client's keyword argument and, where HTTP has it, of the member of
the JSON body; the field is of `GenerateRequest` ([api.md](api.md)). A value outside of the range is
refused with INVALID_ARGUMENT, which names the field.
"""


def reference() -> str:
    """Return the text of docs/parameters.md."""
    rows = [
        "| name | field | flag | HTTP | range | default | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_row(name, parameter) for name, parameter in PARAMETERS.items()),
    ]
    return f"{HEAD}\n" + "\n".join(rows) + "\n"


def _row(name: str, parameter: Parameter) -> str:
    allowed = f"`{parameter.range}`" if parameter.range else ""
    default = "" if parameter.default is None else f"{parameter.default:g}"
    flags = ", ".join(f"`{flag}`" for flag in parameter.shown_flags(name))
    http = "yes" if parameter.http else ""
    cells = (f"`{name}`", f"`{parameter.path}`", flags, http, allowed, default, parameter.help)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    TARGET.write_text(reference())
