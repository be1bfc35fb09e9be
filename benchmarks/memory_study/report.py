"""What was found, as tables: for the terminal and for the Markdown file alike."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from benchmarks.memory_study import paper
from benchmarks.memory_study.contiguous import RESERVATIONS
from benchmarks.memory_study.study import DATASETS, OCTAVO, SYSTEMS, Study

CLAIM = 0.96
"""Useful share of KV memory that paging promises at block size 16."""

PARTS = {"useful": "green", "reserved": "yellow", "internal": "red", "external": "bright_black"}
"""The parts of the memory, in the order of the paper's figure 2, and their colours."""

_GLYPHS = "█▒░·"
"""The parts again, for where there are no colours."""

_BAR = 60

BEAM_NOTE = (
    "As above. How beams fork is simulated, from SmolLM2's next-token probabilities "
    "(`benchmarks/memory_study/beams.py`), and nothing is tuned to the paper. Each simulated beam "
    "is independent of its siblings, which may share too much: over the first 40 tokens at width "
    "6, 44% against SmolLM2's own 39%. Where outputs are long, as ShareGPT's, all but the last "
    "few dozen tokens is then shared, so its figures near the most there can be (50, 75 and 83%) "
    "and widths 4 and 6 exceed the paper's; how OPT-13B's beams fork was not measured."
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first column is text and the others are numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str

    def markdown(self) -> str:
        """For a file."""
        rule = [" --- ", *(" ---: " for _ in self.columns[1:])]
        lines = [
            f"## {self.title}\n",
            f"| {' | '.join(self.columns)} |",
            f"|{'|'.join(rule)}|",
            *(f"| {' | '.join(row)} |" for row in self.rows),
            f"\n{self.note}\n",
        ]
        return "\n".join(lines)

    def rich(self) -> RichTable:
        """For the terminal."""
        table = RichTable(
            title=self.title, caption=self.note, title_justify="left", caption_justify="left"
        )
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
        for row in self.rows:
            table.add_row(*row, style="bold" if row[0].endswith(OCTAVO) else None)
        return table


def percent(share: float) -> str:
    """A share as people read it."""
    return f"{100 * share:.1f}%"


def memory_table(study: Study) -> Table:
    """Useful memory and the parts of the waste, by system."""
    rows = []
    for name, systems in study.memory.items():
        for system in SYSTEMS:
            use = systems[system]
            published = paper.USEFUL_MEMORY[system] if name == "ShareGPT" else None
            rows.append(
                [
                    f"{name}, {system}",
                    percent(use["useful"]),
                    percent(published) if published else "-",
                    percent(use["reserved"]),
                    percent(use["internal"]),
                    percent(use["external"]),
                    percent(use["useful_of_allocated"]),
                    f"{use['requests']:.1f}",
                ]
            )
    return Table(
        "KV memory while requests wait",
        [
            "System",
            "Useful",
            "Paper",
            "Reserved",
            "Internal",
            "External",
            "Useful of held",
            "Requests",
        ],
        rows,
        "Shares of all KV memory, averaged over time. Reserved: to be filled later. Internal: "
        "never to be filled. External: buddy rounding and slots that nobody holds. Useful of "
        "held: of the slots that requests hold. Requests: running at once. Paper: figure 2.",
    )


def throughput_table(study: Study) -> Table:
    """Rates at equal latency, and Octavo's over each baseline's."""
    rows = []
    for name, systems in study.throughput.items():
        for system in SYSTEMS:
            if system not in systems:
                continue
            ratio = "-" if system == OCTAVO else f"{study.speedup(name, system):.2f}x"
            published = _published_speedup(name, system)
            rows.append([f"{name}, {system}", f"{systems[system]['rate']:.2f}", ratio, published])
    return Table(
        f"Requests a second at no more than {paper.LATENCY_BOUND} s per output token",
        ["System", "Requests/s", "Octavo's ratio", "Paper (vLLM)"],
        rows,
        "The mean of each request's latency divided by its output's length is held to the bound. "
        "Times are a cost model's, not a GPU's: read the ratios. Translation's lengths are ours "
        "and no overhead per step is counted, which may be why its ratios exceed the paper's. "
        "Paper: sections 6.2 and 6.4.",
    )


def _published_speedup(dataset: str, system: str) -> str:
    if dataset == "ShareGPT":
        return paper.SHAREGPT_SPEEDUP.get(system, "-")
    return paper.PREFIX_SPEEDUP.get(dataset, "-") if system in RESERVATIONS else "-"


def expected_useful(tokens: float, size: int) -> float:
    """What arithmetic leaves useful of the memory that sequences hold, whoever manages it.

    The last block of a sequence holds 1 to `size` tokens; where sequences are longer than
    a block, each number is about as frequent, and (size - 1) / 2 places are empty.

    Args:
        tokens: what a sequence holds on average.
        size: of a block.
    """
    return tokens / (tokens + (size - 1) / 2)


def _tokens_per_request(study: Study, use: dict[str, float], size: int) -> float:
    """Tokens that a running request held on average, in a run with blocks of `size`."""
    return use["useful"] * (study.slots // size * size) / use["requests"]


def block_size_table(study: Study) -> Table:
    """Useful memory and batch by block size."""
    rows = []
    for name, sizes in study.block_sizes.items():
        rows += [
            [
                f"{name}, {size}",
                percent(use["useful_of_allocated"]),
                percent(expected_useful(_tokens_per_request(study, use, int(size)), int(size))),
                percent(use["useful"]),
                f"{use['requests']:.1f}",
                f"{use['preemptions_swap'] + use['preemptions_recompute']:.0f}",
            ]
            for size, use in sizes.items()
        ]
    return Table(
        "Block sizes, in Octavo",
        [
            "Tokens per block",
            "Useful of held",
            "Expected",
            "Useful of all",
            "Requests",
            "Preemptions",
        ],
        rows,
        "Expected: of what requests hold, L / (L + (b - 1) / 2), where they hold L tokens on "
        "average and half of the last block of b is empty. What is missing there is the block "
        "size's and not the manager's; where most sequences are shorter than a block, more is. "
        "Memory alone: that small blocks make attention slower (section 7.2) is not modelled.",
    )


def sharing_table(study: Study) -> Table:
    """Blocks saved by parallel sampling."""
    rows = [
        [f"{name}, n = {n}", percent(use["saved_by_sharing"]), paper.SHARING[name]]
        for name, counts in study.sharing.items()
        for n, use in counts.items()
    ]
    return Table(
        "Blocks saved by sharing the prompt among n samples",
        ["Requests", "Saved", "Paper, n = 2 to 6"],
        rows,
        "Block-table entries minus blocks in use, over entries; averaged over time, at "
        f"block size 16. Only {percent(study.traces['Alpaca']['prompts_that_fill_a_block'])} of "
        "Alpaca's prompts fill a block, which is what they can share for long; the share depends "
        "on the distribution's width, which the paper does not give.",
    )


def beam_table(study: Study) -> Table:
    """Blocks saved by beam search."""
    rows = [
        [f"{name}, width {width}", percent(use["saved_by_sharing"]), paper.BEAM_SHARING[name]]
        for name, widths in study.beams.items()
        for width, use in widths.items()
    ]
    return Table(
        "Blocks saved by sharing among the beams of a search",
        ["Requests", "Saved", "Paper, widths 2 to 6"],
        rows,
        BEAM_NOTE,
    )


def prefix_table(study: Study) -> Table:
    """Blocks and prefill saved by the prefix cache."""
    rows = []
    for name, runs in study.prefixes.items():
        cached, uncached = runs["cached"], runs["uncached"]
        rows.append(
            [
                name,
                percent(cached["saved_by_sharing"]),
                percent(cached["cached_tokens"] / cached["prompt_tokens"]),
                f"{cached['requests']:.0f} / {uncached['requests']:.0f}",
                f"{cached['capacity'] / uncached['capacity']:.2f}x",
            ]
        )
    return Table(
        "A prefix that all prompts have, with the prefix cache and without",
        [
            "Workload",
            "Blocks saved",
            "Prefill tokens saved",
            "Requests at once",
            "Requests/s, full load",
        ],
        rows,
        "Prefixes of 80 and 341 tokens (section 6.4). Only full blocks are shared: 5 and 21 of 16.",
    )


def tables(study: Study) -> list[Table]:
    """All of them, in the order of the claims."""
    return [
        memory_table(study),
        throughput_table(study),
        block_size_table(study),
        sharing_table(study),
        beam_table(study),
        prefix_table(study),
    ]


def verdicts(study: Study) -> list[str]:
    """One line for each claim: whether it is met, and where it is not, why."""
    lines = []
    for dataset in DATASETS:
        use = study.memory[dataset.name][OCTAVO]
        met = use["useful"] >= CLAIM
        line = (
            f"{'MET' if met else 'NOT MET'}: at block size 16 on {dataset.name}, "
            f"{percent(use['useful'])} of all KV memory is useful, and "
            f"{percent(use['useful_of_allocated'])} of what requests hold; {percent(CLAIM)} is "
            "claimed."
        )
        if not met:
            line += _why_not(study, dataset.name)
        lines.append(line)
    for dataset in DATASETS:
        ratios = ", ".join(
            f"{study.speedup(dataset.name, system):.2f}x over {system}" for system in RESERVATIONS
        )
        lines.append(f"Request rate at equal latency on {dataset.name}: {ratios}.")
    return lines


def _why_not(study: Study, dataset: str) -> str:
    """What the block size has to do with a claim that is not met, if that explains it."""
    tokens = _tokens_per_request(study, study.memory[dataset][OCTAVO], 16)
    most = expected_useful(tokens, 16)
    if most >= CLAIM:
        return ""
    largest = int(1 + 2 * tokens * (1 / CLAIM - 1))
    text = (
        f" A running sequence holds L = {tokens:.0f} tokens on average, and of its last block of "
        "b = 16 half is empty, so of what requests hold no manager can make more than about "
        f"L / (L + (b - 1) / 2) = {percent(most)} useful; {percent(CLAIM)} takes blocks of at "
        f"most {largest} tokens."
    )
    sizes = study.block_sizes[dataset]
    reached = [size for size, use in sizes.items() if use["useful"] >= CLAIM]
    if reached:
        size = max(reached, key=int)
        text += f" Blocks of {size} keep {percent(sizes[size]['useful'])} of all useful."
    return text


def markdown(study: Study, made: str) -> str:
    """The whole report; `made` says when and on what."""
    setting = (
        f"Made by `python -m benchmarks.memory_study`, {made}. {study.slots:,} KV slots "
        "(OPT-13B in 12 GB); lengths, arrivals and the cost of a step are stated in "
        "`benchmarks/memory_study/traces.py` and `cost.py`."
    )
    lengths = ", ".join(
        f"{name} {t['mean_prompt']:.0f} in and {t['mean_output']:.0f} out"
        for name, t in study.traces.items()
    )
    parts = [
        "# Memory study\n",
        setting + "\n",
        f"Mean tokens drawn: {lengths}.\n",
        *(f"- {line}" for line in verdicts(study)),
        "\n![Plots](memory_study.png)\n",
        *(table.markdown() for table in tables(study)),
    ]
    return "\n".join(parts)


def show(study: Study, console: Console) -> None:
    """Prints it all."""
    memory, *rest = (table.rich() for table in tables(study))
    parts: list[RenderableType] = [memory, bars(study)]
    for table in rest:
        parts += ["", table]
    console.print(Group(*parts))
    for line in verdicts(study):
        console.print(line, style="bold", highlight=False)


def bars(study: Study) -> RenderableType:
    """The memory's parts as bars, ours above the paper's."""
    legend = Text("  ").join(
        Text(f"{glyph} {part}", style=colour)
        for glyph, (part, colour) in zip(_GLYPHS, PARTS.items(), strict=True)
    )
    lines: list[Text] = [legend]
    for dataset in DATASETS:
        for system in SYSTEMS:
            shares = study.memory[dataset.name][system]
            lines.append(_bar(f"{dataset.name}, {system}", (shares[part] for part in PARTS)))
            if dataset.name == "ShareGPT" and system in paper.WASTE:
                waste = paper.WASTE[system]
                published = (paper.USEFUL_MEMORY[system], *waste.values())
                lines.append(_bar("  in the paper", published))
    return Group(*lines)


def _bar(label: str, shares: Iterable[float]) -> Text:
    text = Text(f"{label:<24}")
    done = total = 0.0
    for share, colour, glyph in zip(shares, PARTS.values(), _GLYPHS, strict=True):
        total += share
        width = round(_BAR * total) - round(_BAR * done)
        text.append(glyph * width, style=colour)
        done = total
    return text
