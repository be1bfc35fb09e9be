"""The settings of `octavo serve` alone."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from octavo.common.settings import Settings

Words = Literal["auto", "off"]


def _check(value: object) -> object:
    """Return a number or word of --engines-per-node.

    Raises:
        ValueError: It is neither.
    """
    if value in {"auto", "off"}:
        return value
    text = str(value).strip()
    if not text.isdecimal() or not int(text):
        raise ValueError("must be auto, off, or a number from 1")
    return int(text)


class ServeSettings(Settings):
    """Settings of `octavo serve`, beside those of the router and of its engines."""

    table: ClassVar[str] = "serve"

    engines_per_node: Annotated[Words | int, BeforeValidator(_check)] = Field(
        "auto",
        description="Engines on each NUMA node's cores and memory, on a CPU. auto: one, if there"
        " are several nodes, the model fits into the memory of each, and no CPU quota leaves cores"
        " unused. off: one engine for all nodes. A number also divides a node's cores.",
    )
