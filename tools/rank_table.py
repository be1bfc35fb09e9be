"""The table of what ranks serve in docs/operating.md: `python -m tools.rank_table`."""

from pathlib import Path

from octavo.engine.parallel.served import FEATURES
from tools.generated_part import MadePart

PLACE = MadePart(Path("docs/operating.md"), "ranks", target="docs")


def markdown() -> str:
    """Return the table."""
    rows = ["| | tensor parallel | pipeline |", "| --- | --- | --- |"]
    for each in FEATURES:
        cells = ("yes" if why is None else f"no: {why}" for why in (each.tensor, each.pipeline))
        rows.append(f"| {each.name} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    PLACE.renew(markdown())
