"""The plots: memory as in the paper's figure 2, latency as in figure 12, block sizes, sharing."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.memory_study import paper
from benchmarks.memory_study.study import DATASETS, OCTAVO, SYSTEMS, Study

_PARTS = {"useful": "#2a9d5c", "reserved": "#e9c46a", "internal": "#d1495b", "external": "#b0b0b0"}
_COLOURS = dict(zip(SYSTEMS, ("#d1495b", "#e08e45", "#5b7db1", "#2a9d5c"), strict=True))


def save(study: Study, path: Path) -> None:
    """Writes them all into one PNG."""
    figure = Figure(figsize=(12, 13), layout="constrained")
    axes = figure.subplots(3, 2)
    for column, dataset in enumerate(DATASETS):
        _memory(axes[0, column], study, dataset.name)
        _latency(axes[1, column], study, dataset.name)
    _block_sizes(axes[2, 0], study)
    _sharing(axes[2, 1], study)
    figure.savefig(path, dpi=100)


def _memory(axes: Axes, study: Study, dataset: str) -> None:
    bottom = [0.0] * len(SYSTEMS)
    for part, colour in _PARTS.items():
        heights = [100 * study.memory[dataset][system][part] for system in SYSTEMS]
        bars = axes.bar(SYSTEMS, heights, bottom=bottom, color=colour, label=part)
        axes.bar_label(bars, [f"{h:.1f}" if h > 4 else "" for h in heights], label_type="center")
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    if dataset == "ShareGPT":
        published = [100 * paper.USEFUL_MEMORY[system] for system in SYSTEMS]
        axes.plot(SYSTEMS, published, "kD", markersize=5, label="useful in the paper")
    axes.set(title=f"KV memory, {dataset}", ylabel="% of all slots")
    _legend(axes, 5)


def _latency(axes: Axes, study: Study, dataset: str) -> None:
    for system, found in study.throughput[dataset].items():
        rates, latencies = zip(*found["points"], strict=True)
        axes.plot(rates, latencies, "o-", color=_COLOURS[system], label=system)
    axes.axhline(paper.LATENCY_BOUND, color="black", linestyle=":")
    axes.set(
        title=f"Normalised latency, {dataset}", xlabel="requests/s", ylabel="s per output token"
    )
    axes.set_ylim(bottom=0)
    _legend(axes, 4)


def _block_sizes(axes: Axes, study: Study) -> None:
    batch = axes.twinx()
    for dataset, marker in zip(DATASETS, ("o", "s"), strict=True):
        sizes = study.block_sizes[dataset.name]
        useful = [100 * use["useful_of_allocated"] for use in sizes.values()]
        most = max(use["requests"] for use in sizes.values())
        requests = [100 * use["requests"] / most for use in sizes.values()]
        axes.plot(list(sizes), useful, marker=marker, label=f"{dataset.name}: useful of held")
        batch.plot(list(sizes), requests, marker=marker, linestyle=":", alpha=0.6)
    axes.axhline(96, color="black", linestyle=":")
    axes.set(title="Block sizes", xlabel="tokens per block", ylabel="% useful", ylim=(0, 102))
    batch.set(ylabel="dotted: requests at once, % of the most", ylim=(0, 102))
    _legend(axes, 2)


def _sharing(axes: Axes, study: Study) -> None:
    for offset, dataset in zip((-0.2, 0.2), DATASETS, strict=True):
        name = dataset.name
        runs = [*study.sharing[name].values(), *study.beams[name].values()]
        saved = [100 * use["saved_by_sharing"] for use in runs]
        places = [i + offset for i in range(len(runs))]
        label = f"{name} (paper: {paper.SHARING[name]}, beams {paper.BEAM_SHARING[name]})"
        axes.bar_label(axes.bar(places, saved, width=0.4, label=label), fmt="%.1f")
    first = DATASETS[0].name
    labels = [f"n = {n}" for n in study.sharing[first]]
    labels += [f"{width} beams" for width in study.beams[first]]
    axes.set_xticks(range(len(labels)), labels)
    axes.set(title=f"Blocks saved by samples and by beams, {OCTAVO}", ylabel="%")
    _legend(axes, 2)


def _legend(axes: Axes, columns: int) -> None:
    """Puts the legend below the plot, where it covers nothing."""
    axes.legend(
        fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=columns, frameon=False
    )
