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

A model may have its own defaults: the engine reads them from the model's
`generation_config.json`, and the router uses them where a request does not set a parameter. What a
request sets wins, also a value that changes nothing, such as temperature 1. The column "model's
default" names the key. A value outside of the range is left out with a warning in the engine's
log. `do_sample` is not read: transformers takes its absence for false, and models that are meant
to be sampled often lack it. A beam search uses `max_new_tokens` alone. `max_new_tokens` is cut to
the room that context and KV cache leave; `/v1/completions` has OpenAI's default of 16 tokens
instead. `ListModels`, `GET /v1/models` and `octavo status --json` show a model's defaults;
`--generation-config none` turns them off. Where the engines of one model differ, the router uses
those of the first address and logs a warning.
"""


def reference() -> str:
    """Return the text of docs/parameters.md."""
    rows = [
        "| name | field | flag | HTTP | range | default | model's default | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(name, parameter) for name, parameter in PARAMETERS.items()),
    ]
    return f"{HEAD}\n" + "\n".join(rows) + "\n"


def _row(name: str, parameter: Parameter) -> str:
    allowed = f"`{parameter.range}`" if parameter.range else ""
    default = "" if parameter.default is None else f"{parameter.default:g}"
    flags = ", ".join(f"`{flag}`" for flag in parameter.shown_flags(name))
    http = "yes" if parameter.http else ""
    own = f"`{parameter.generation_config}`" if parameter.generation_config else ""
    cells = (
        *(f"`{name}`", f"`{parameter.path}`", flags),
        *(http, allowed, default, own, parameter.help),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    TARGET.write_text(reference())
