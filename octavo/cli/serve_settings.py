"""Settings of `octavo serve` only."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from octavo.common.settings import Settings

Words = Literal["auto", "off"]


def _check(value: object) -> object:
    """Parse the value of --engines-per-node.

    Raises:
        ValueError: The value is not a word or a number.
    """
    if value in {"auto", "off"}:
        return value
    text = str(value).strip()
    if not text.isdecimal() or not int(text):
        raise ValueError("must be auto, off, or a number from 1")
    return int(text)


class ServeSettings(Settings):
    """Settings of `octavo serve`, in addition to those of router and engines."""

    table: ClassVar[str] = "serve"

    engines_per_node: Annotated[Words | int, BeforeValidator(_check)] = Field(
        "auto",
        description="Number of engines per NUMA node, each on its cores and memory; CPU only. "
        "auto: one, if there are several nodes, the model fits into each node's memory, and no CPU "
        "quota leaves cores unused. off: one engine for all nodes. A number also divides a node's "
        "cores.",
    )
