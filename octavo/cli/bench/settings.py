"""Settings of `octavo bench`, from its flags."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

import typer

DEFAULT_TOKENS = 128.0
DEFAULT_REQUESTS = 64


class Shape(StrEnum):
    """Distribution of lengths around their mean."""

    FIXED = "fixed"
    NORMAL = "normal"
    LOGNORMAL = "lognormal"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens.

    Attributes:
        shape: FIXED, NORMAL or LOGNORMAL.
        mean: Mean length, before rounding and clipping to the model's context.
        spread: Standard deviation, in tokens; 0 if fixed.
    """

    shape: Shape
    mean: float
    spread: float


# The data sets' means in the PagedAttention paper (section 6.1); the paper states no standard
# deviations, so these are assumed.
DATA_SETS = {
    Shape.SHAREGPT: (Lengths(Shape.LOGNORMAL, 161, 400), Lengths(Shape.LOGNORMAL, 338, 440)),
    Shape.ALPACA: (Lengths(Shape.LOGNORMAL, 19, 8), Lengths(Shape.LOGNORMAL, 58, 64)),
}
"""Prompt and output lengths of the shapes named after a data set."""


def choose_lengths(
    shape: Shape,
    prompt: tuple[float | None, float | None],
    output: tuple[float | None, float | None],
) -> tuple[Lengths, Lengths]:
    """Return the distributions of prompt and output lengths from (mean, spread) flags.

    Raises:
        typer.BadParameter: A spread is given for a fixed length.
    """
    chosen = []
    presets = DATA_SETS.get(shape, (None, None))
    for name, preset, (mean, spread) in zip(
        ("prompt", "output"), presets, (prompt, output), strict=True
    ):
        if shape is Shape.FIXED and spread:
            raise typer.BadParameter(f"--{name}-spread needs --lengths normal or lognormal")
        if preset is not None:
            mean = preset.mean if mean is None else mean  # noqa: PLW2901
            spread = preset.spread if spread is None else spread  # noqa: PLW2901
            chosen.append(Lengths(Shape.LOGNORMAL, mean, spread))
        else:
            mean = DEFAULT_TOKENS if mean is None else mean  # noqa: PLW2901
            default = 0 if shape is Shape.FIXED else mean / 2
            chosen.append(Lengths(shape, mean, default if spread is None else spread))
    return chosen[0], chosen[1]


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Requests of random tokens.

    Attributes:
        prefix: Length in tokens of a prefix that all prompts share.
    """

    prompt: Lengths
    output: Lengths
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class Dataset:
    """Requests from a JSON-lines file.

    Attributes:
        max_tokens: Default for lines without max_tokens.
    """

    path: Path
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run.

    Attributes:
        count: Number of requests; None: DEFAULT_REQUESTS, or all lines of a file.
        seed: Seed of prompts, lengths and arrival times.
        ignore_eos: Whether to generate the full output length.
    """

    source: Synthetic | Dataset
    count: int | None
    seed: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Closed:
    """Closed loop: keep `concurrency` requests in flight; None sends all at once."""

    concurrency: int | None


@dataclass(frozen=True, slots=True)
class Open:
    """Open loop: send requests at random times, independent of earlier ones.

    Attributes:
        rate: Requests per second, on average.
        burstiness: Shape of the gamma distribution of gaps. 1: a Poisson process;
            less: bursts; more: evenly spaced.
    """

    rate: float
    burstiness: float = 1.0


Plan = Closed | Open


@dataclass(frozen=True, slots=True)
class Target:
    """The server and model to measure.

    Attributes:
        address: Address of a running router; unused if `serve` or `url` is set.
        model: The model's name; None: the first one served.
        serve: Model of the server to start; None: use `address`.
        server_flags: Flags of that server.
        timeout: Deadline per request in seconds.
        warmup: Requests sent before each run, not measured.
        url: URL of a running server with OpenAI's API; None: use gRPC.
    """

    address: str
    model: str | None
    serve: str | None = None
    server_flags: tuple[str, ...] = ()
    timeout: float | None = None
    warmup: int = 1
    url: str | None = None


def openai_base_url(url: str) -> str:
    """Return the URL before `/completions`: "http://host:8000" becomes "http://host:8000/v1".

    Raises:
        ValueError: The text is not an http or https URL of a host.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} must be http://HOST:PORT or https://HOST:PORT")
    _ = parts.port  # raises ValueError if invalid
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{url!r} must have no user, query or fragment; set the key by --api-key")
    return url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


@dataclass(frozen=True, slots=True)
class Objectives:
    """Maximum latencies for goodput, in milliseconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None


def parse_objectives(texts: Sequence[str]) -> Objectives | None:
    """Parse objectives such as "ttft:500"; return None if there are none.

    Raises:
        typer.BadParameter: A text is not NAME:MS, or repeats a name.
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in Objectives.__slots__ or not 0 < limit < math.inf:
            raise typer.BadParameter(
                f"--slo {text!r}: must be ttft:MS, tpot:MS or e2e:MS, with MS above 0"
            )
        if name in limits:
            raise typer.BadParameter(f"--slo sets {name} twice; set it once")
        limits[name] = limit
    return Objectives(**limits) if limits else None


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files of the results.

    Attributes:
        json: The JSON file; "-" is stdout, and tables then go to stderr.
        plot: The PNG, SVG or PDF file.
    """

    json: str | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Check before the measurement that the files can be written.

        Raises:
            typer.BadParameter: A folder is missing, the plot's suffix is unknown or
                matplotlib is not installed.
        """
        for flag, path in (("--json", self.json), ("--plot", self.plot)):
            if path is not None and not Path(path).parent.is_dir():
                raise typer.BadParameter(
                    f"{flag} {path}: the folder does not exist; create it first"
                )
        if self.plot is None:
            return
        if self.plot.suffix not in {".png", ".svg", ".pdf"}:
            raise typer.BadParameter(f"--plot {self.plot}: must end in .png, .svg or .pdf")
        if importlib.util.find_spec("matplotlib") is None:
            raise typer.BadParameter("--plot needs matplotlib: pip install 'octavo[bench]'")
