"""Settings of `octavo serve` only."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from octavo.common.settings import Settings, flag
from octavo.router.settings import RAY_NAME

Words = Literal["auto", "off"]
SHARE_OF_MEMORY = 0.9
"""Share of the free memory that several models use by default."""


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
    models: Path | None = Field(
        None,
        description="TOML file with a table [models.NAME] for each model that requests may name:"
        " settings of its engine, aliases, pin, idle_timeout. A model is loaded when a request"
        " names it.",
    )
    models_dir: Path | None = Field(
        None,
        description="Directory of GGUF files and of models' directories, in place of --models: each"
        " is a model that requests may name, by the name there without .gguf. The directory is read"
        " again when it changes.",
    )
    memory: float | None = Field(
        None,
        gt=0,
        description="GiB of memory of all loaded models together, if there are several; for a"
        " further one, the least recently used is unloaded. Default: nine tenths of the free"
        " memory.",
    )
    idle_timeout: float = Field(
        0.0,
        ge=0,
        description="Seconds without requests after which one of several models is unloaded; 0:"
        " never.",
    )
    spare_engine: bool = Field(
        True,
        description="Keep an engine process without a model ready, if there are several models and"
        " --memory has 0.3 GiB left for it. It loads the next model some 3 seconds sooner.",
    )
    ray: bool = Field(
        False,
        description="Run the engines on the Ray cluster of this machine, or of RAY_ADDRESS, in"
        " place of this machine alone.",
    )
    ray_name: str = Field(
        "octavo",
        pattern=f"^{RAY_NAME}$",
        description="Name of the engines on the Ray cluster: other routers find them by --engine"
        " ray://NAME.",
    )
    ray_resources: dict[str, float] = Field(
        {},
        description="Ray resources of each rank, as a JSON object of amounts. Default: a GPU and 4"
        " CPUs if the cluster has GPUs, else all CPUs of the smallest node.",
    )
    ray_min_engines: int = Field(1, ge=1, description="Minimum engines on the Ray cluster.")
    ray_max_engines: int | None = Field(
        None,
        ge=1,
        description="Maximum engines on the Ray cluster. Default: --ray-min-engines, which disables"
        " autoscaling.",
    )
    ray_target_wait: float = Field(
        2.0, gt=0, description="Mean seconds that requests wait, above which engines are added."
    )
    ray_target_kv_use: float = Field(
        0.7,
        gt=0,
        le=1,
        description="Mean use of the KV cache, 0 to 1, above which engines are added.",
    )
    ray_scale_down_delay: float = Field(
        300.0,
        ge=0,
        description="Seconds for which fewer engines must suffice before one is drained.",
    )

    @property
    def max_memory(self) -> int:
        """Maximum memory of all loaded models together, in bytes."""
        if self.memory is None:
            from octavo.common.resources import memory  # noqa: PLC0415 - of an extra

            return int(memory().available * SHARE_OF_MEMORY)
        return int(self.memory * 2**30)

    @property
    def on_demand(self) -> bool:
        """Whether even a single model is loaded when a request names it."""
        return bool(self.model_fields_set & {"models", "models_dir", "memory", "idle_timeout"})

    @model_validator(mode="after")
    def _ray_or_not(self) -> Self:
        """Refuse settings that would have no effect."""
        for name in sorted(self.model_fields_set):
            if not self.ray and name.startswith("ray_"):
                raise ValueError(f"{flag(name)} needs --ray")
        if self.ray and self.on_demand:
            raise ValueError("models are not loaded on demand with --ray: start a server for each")
        if self.ray and "engines_per_node" in self.model_fields_set:
            raise ValueError("--engines-per-node does not work with --ray: use --ray-min-engines")
        return self

    @model_validator(mode="after")
    def _engines_are_a_range(self) -> Self:
        if self.ray_max_engines is not None and self.ray_max_engines < self.ray_min_engines:
            raise ValueError(
                f"--ray-max-engines ({self.ray_max_engines}) must be at least --ray-min-engines"
                f" ({self.ray_min_engines})"
            )
        return self
