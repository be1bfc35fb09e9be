"""What a call of `octavo bench` is to do, as its flags said."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import typer

DEFAULT_TOKENS = 128.0
DEFAULT_REQUESTS = 64


class Shape(StrEnum):
    """How lengths are spread around their mean."""

    FIXED = "fixed"
    NORMAL = "normal"
    LOGNORMAL = "lognormal"
    SHAREGPT = "sharegpt"


@dataclass(frozen=True, slots=True)
class Lengths:
    """The distribution of a number of tokens.

    Attributes:
        shape: FIXED, NORMAL or LOGNORMAL.
        mean: before rounding, and before cutting to what the model takes.
        spread: standard deviation, in tokens; 0 if fixed.
    """

    shape: Shape
    mean: float
    spread: float


# The means are ShareGPT's in the PagedAttention paper (section 6.1). It gives no
# spreads; these are wide, as what people paste and what models answer.
SHAREGPT = (Lengths(Shape.LOGNORMAL, 161, 400), Lengths(Shape.LOGNORMAL, 338, 440))


def choose_lengths(
    shape: Shape,
    prompt: tuple[float | None, float | None],
    output: tuple[float | None, float | None],
) -> tuple[Lengths, Lengths]:
    """The distributions of prompt and output lengths, from (mean, spread) flags.

    Raises:
        typer.BadParameter: a fixed length was given a spread.
    """
    chosen = []
    for name, preset, (mean, spread) in zip(
        ("prompt", "output"), SHAREGPT, (prompt, output), strict=True
    ):
        if shape is Shape.FIXED and spread:
            raise typer.BadParameter(f"--{name}-spread needs --lengths normal or lognormal")
        if shape is Shape.SHAREGPT:
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
        prefix: tokens in front of each prompt that are the same in all.
    """

    prompt: Lengths
    output: Lengths
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class Dataset:
    """Requests from a JSON-lines file.

    Attributes:
        max_tokens: for lines that do not say it.
    """

    path: Path
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What requests are sent.

    Attributes:
        count: how many; None is DEFAULT_REQUESTS, or all lines of a file.
        seed: what prompts, lengths and arrival times are drawn with.
        ignore_eos: outputs go on to their full length.
    """

    source: Synthetic | Dataset
    count: int | None
    seed: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Closed:
    """So many requests in flight at any time: one ends, the next is sent. None: all at once."""

    concurrency: int | None


@dataclass(frozen=True, slots=True)
class Open:
    """Requests come by the clock, whatever became of those before.

    Attributes:
        rate: requests per second, on average.
        burstiness: shape of the gaps' gamma distribution. 1: a Poisson process;
            below it requests come in bursts, above it more evenly.
    """

    rate: float
    burstiness: float = 1.0


Plan = Closed | Open


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured.

    Attributes:
        address: a running router's; not used if `serve` is set.
        model: the model's name; None: the first one served.
        serve: the model to start a server of one's own with.
        server_flags: more flags for that server.
        timeout: each request's deadline in seconds.
        warmup: requests that are sent before each run and do not count.
    """

    address: str
    model: str | None
    serve: str | None = None
    server_flags: tuple[str, ...] = ()
    timeout: float | None = None
    warmup: int = 1


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must keep to count as goodput: milliseconds; None: anything goes."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None


def parse_objectives(texts: Sequence[str]) -> Objectives | None:
    """Reads "ttft:500"; None if there are none.

    Raises:
        typer.BadParameter: a text is no NAME:MILLISECONDS, or names one twice.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in Objectives.__slots__ or not 0 < limit < math.inf:
            raise typer.BadParameter(
                f"--slo {text!r} is none of ttft:MS, tpot:MS, e2e:MS, with MS above 0"
            )
        if name in found:
            raise typer.BadParameter(f"--slo has {name} twice")
        found[name] = limit
    return Objectives(**found) if found else None


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where results go besides the terminal.

    Attributes:
        json: the file; "-" is stdout, and what is for people then goes to stderr.
        plot: the PNG, SVG or PDF file.
    """

    json: str | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Finds out before the measurement whether it can be kept.

        Raises:
            typer.BadParameter: a folder is missing, the plot's ending is unknown or
                matplotlib is not installed.
        """
        for flag, path in (("--json", self.json), ("--plot", self.plot)):
            if path is not None and not Path(path).parent.is_dir():
                raise typer.BadParameter(f"{flag} {path}: there is no such folder")
        if self.plot is None:
            return
        if self.plot.suffix not in {".png", ".svg", ".pdf"}:
            raise typer.BadParameter(f"--plot {self.plot}: must end in .png, .svg or .pdf")
        if importlib.util.find_spec("matplotlib") is None:
            raise typer.BadParameter("--plot needs matplotlib: pip install 'octavo[bench]'")
