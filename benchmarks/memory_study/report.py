"""Write what the study found as a page of Markdown."""

from benchmarks.memory_study import paper
from benchmarks.memory_study.contiguous import RESERVATIONS
from benchmarks.memory_study.study import DATASETS, OCTAVO, SYSTEMS, Study
from benchmarks.report import table

CLAIM = 0.96
"""Useful share of KV memory that paging promises at block size 16."""

MEMORY_NOTE = (
    "Shares of all KV memory, averaged over time. Reserved: to be filled later. Internal: never to "
    "be filled. External: buddy rounding and slots that nobody holds. Useful of held: of the slots "
    "that requests hold. Requests: running at once. Paper: figure 2."
)
RATE_NOTE = (
    "The mean of each request's latency divided by its output's length is held to the bound. Times "
    "are a cost model's, not a GPU's: read the ratios. Translation's lengths are ours and no "
    "overhead per step is counted, which may be why its ratios exceed the paper's. Paper: sections "
    "6.2 and 6.4."
)
SIZE_NOTE = (
    "Expected: of what requests hold, L / (L + (b - 1) / 2), where they hold L tokens on average "
    "and half of the last block of b is empty. What is missing there is the block size's and not "
    "the manager's; where most sequences are shorter than a block, more is. Memory alone: that "
    "small blocks make attention slower (section 7.2) is not modelled."
)
SHARING_NOTE = (
    "Block-table entries minus blocks in use, over entries; averaged over time, at block size 16. "
    "Only {} of Alpaca's prompts fill a block, which is what they can share for long; the share "
    "depends on the distribution's width, which the paper does not give."
)
PREFIX_NOTE = (
    "Prefixes of 80 and 341 tokens (section 6.4). Only full blocks are shared: 5 and 21 of 16."
)
BEAM_NOTE = (
    "As above. How beams fork is simulated, from SmolLM2's next-token probabilities "
    "(`benchmarks/memory_study/beams.py`), and nothing is tuned to the paper. Each simulated beam "
    "is independent of its siblings, which may share too much: over the first 40 tokens at width "
    "6, 44% against SmolLM2's own 39%. Where outputs are long, as ShareGPT's, all but the last "
    "few dozen tokens is then shared, so its figures near the most there can be (50, 75 and 83%) "
    "and widths 4 and 6 exceed the paper's; how OPT-13B's beams fork was not measured."
)


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.1f}%"


def memory_table(study: Study) -> str:
    """Return useful memory and the parts of the waste, by system."""
    rows = []
    for name, systems in study.memory.items():
        for system in SYSTEMS:
            use = systems[system]
            published = percent(paper.USEFUL_MEMORY[system]) if name == "ShareGPT" else "-"
            wasted = (percent(use[part]) for part in ("reserved", "internal", "external"))
            held = percent(use["useful_of_allocated"])
            cells = (f"{name}, {system}", percent(use["useful"]), published)
            rows.append((*cells, *wasted, held, f"{use['requests']:.1f}"))
    columns = ("System", "Useful", "Paper", "Reserved", "Internal", "External", "Useful of held")
    return table((*columns, "Requests"), rows)


def throughput_table(study: Study) -> str:
    """Return rates at equal latency, and Octavo's over each baseline's."""
    rows = []
    for name, systems in study.throughput.items():
        for system in SYSTEMS:
            if system not in systems:
                continue
            ratio = "-" if system == OCTAVO else f"{study.speedup(name, system):.2f}x"
            published = _published_speedup(name, system)
            rows.append([f"{name}, {system}", f"{systems[system]['rate']:.2f}", ratio, published])
    return table(("System", "Requests/s", "Octavo's ratio", "Paper (vLLM)"), rows)


def _published_speedup(dataset: str, system: str) -> str:
    if dataset == "ShareGPT":
        return paper.SHAREGPT_SPEEDUP.get(system, "-")
    return paper.PREFIX_SPEEDUP.get(dataset, "-") if system in RESERVATIONS else "-"


def expected_useful(tokens: float, size: int) -> float:
    """Return the useful share of held memory that block size and length allow.

    The last block of a sequence holds 1 to `size` tokens; where sequences are longer than
    a block, each number is about as frequent, and (size - 1) / 2 places are empty.

    Args:
        tokens: what a sequence holds on average.
        size: of a block.
    """
    return tokens / (tokens + (size - 1) / 2)


def _tokens_per_request(study: Study, use: dict[str, float], size: int) -> float:
    """Return the mean tokens of a running request in a run with blocks of `size`."""
    return use["useful"] * (study.slots // size * size) / use["requests"]


def block_size_table(study: Study) -> str:
    """Return useful memory and batch by block size."""
    rows = []
    for name, sizes in study.block_sizes.items():
        for size, use in sizes.items():
            expected = expected_useful(_tokens_per_request(study, use, int(size)), int(size))
            shares = (use["useful_of_allocated"], expected, use["useful"])
            preemptions = use["preemptions_swap"] + use["preemptions_recompute"]
            counts = (f"{use['requests']:.1f}", f"{preemptions:.0f}")
            rows.append((f"{name}, {size}", *map(percent, shares), *counts))
    columns = ("Tokens per block", "Useful of held", "Expected", "Useful of all")
    return table((*columns, "Requests", "Preemptions"), rows)


def sharing_table(study: Study) -> str:
    """Return blocks saved by parallel sampling."""
    rows = [
        (f"{name}, n = {n}", percent(use["saved_by_sharing"]), paper.SHARING[name])
        for name, counts in study.sharing.items()
        for n, use in counts.items()
    ]
    return table(("Requests", "Saved", "Paper, n = 2 to 6"), rows)


def beam_table(study: Study) -> str:
    """Return blocks saved by beam search."""
    rows = [
        (f"{name}, width {width}", percent(use["saved_by_sharing"]), paper.BEAM_SHARING[name])
        for name, widths in study.beams.items()
        for width, use in widths.items()
    ]
    return table(("Requests", "Saved", "Paper, widths 2 to 6"), rows)


def prefix_table(study: Study) -> str:
    """Return blocks and prefill saved by the prefix cache."""
    rows = []
    for name, runs in study.prefixes.items():
        cached, uncached = runs["cached"], runs["uncached"]
        saved = cached["saved_by_sharing"], cached["cached_tokens"] / cached["prompt_tokens"]
        requests = f"{cached['requests']:.0f} / {uncached['requests']:.0f}"
        ratio = f"{cached['capacity'] / uncached['capacity']:.2f}x"
        rows.append((name, *map(percent, saved), requests, ratio))
    columns = ("Workload", "Blocks saved", "Prefill tokens saved", "Requests at once")
    return table((*columns, "Requests/s, full load"), rows)


def verdicts(study: Study) -> list[str]:
    """Return a line for each claim: whether it is met, and if not, why."""
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
    """Return how the block size explains a claim that is not met, if it does."""
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


def sections(study: Study) -> list[tuple[str, str, str]]:
    """Return title, table and note of each part, in the order of the claims."""
    filled = percent(study.traces["Alpaca"]["prompts_that_fill_a_block"])
    rate = f"Requests a second at no more than {paper.LATENCY_BOUND} s per output token"
    samples = "Blocks saved by sharing the prompt among n samples"
    beams = "Blocks saved by sharing among the beams of a search"
    prefixes = "A prefix that all prompts have, with the prefix cache and without"
    return [
        ("KV memory while requests wait", memory_table(study), MEMORY_NOTE),
        (rate, throughput_table(study), RATE_NOTE),
        ("Block sizes, in Octavo", block_size_table(study), SIZE_NOTE),
        (samples, sharing_table(study), SHARING_NOTE.format(filled)),
        (beams, beam_table(study), BEAM_NOTE),
        (prefixes, prefix_table(study), PREFIX_NOTE),
    ]


def markdown(study: Study, made: str) -> str:
    """Return the whole page; `made` says when and on what."""
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
        *(f"\n## {title}\n\n{rows}\n\n{note}" for title, rows, note in sections(study)),
    ]
    return "\n".join(parts) + "\n"
