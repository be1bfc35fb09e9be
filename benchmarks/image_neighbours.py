"""Time what others notice of an image: the gaps between their tokens while it is encoded.

    python -m benchmarks.image_neighbours [--neighbours 4] [--rounds 3]

The model has SmolVLM-256M's sizes with random weights in bfloat16, and cuts an image of 512 x 512
pixels into 17 tiles. First the image is asked about alone, and then beside texts that are being
generated. Gaps count from the question until its first token; the image differs in every round.
"""

import argparse
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Self

from benchmarks.images import QUESTIONS, SERVER, png, save_model
from benchmarks.report import table
from octavo import Client
from octavo.cli.local_server import local_server
from octavo.client import Image, Message


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--neighbours", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        save_model("smolvlm-256m", path)
        with local_server(str(path), *SERVER) as address:
            rows = measure(address, options.neighbours, options.rounds)
    print(table(["", "first token, s", "gaps: median, ms", "p99, ms", "longest, ms"], rows))


def measure(address: str, neighbours: int, rounds: int) -> list[list[str]]:
    """Return the table's rows."""
    with Client(address) as client:
        alone = [first_token(client, number) for number in range(rounds + 1)][1:]  # one warms up
        with Neighbours(address, neighbours) as others:
            time.sleep(2)
            undisturbed = others.gaps(time.perf_counter() - 1, time.perf_counter())
            beside, gaps = list[float](), list[float]()
            for number in range(rounds):
                began = time.perf_counter()
                beside.append(first_token(client, 100 + number))
                gaps += others.gaps(began, time.perf_counter())
    return [
        ["the image alone", f"{statistics.median(alone):.2f}", "", "", ""],
        [f"{neighbours} texts alone", "", *percentiles(undisturbed)],
        ["the image beside them", f"{statistics.median(beside):.2f}", *percentiles(gaps)],
    ]


def first_token(client: Client, number: int) -> float:
    """Return the time to the first token of a question about a new image."""
    chat = [Message("user", [Image(png(number)), QUESTIONS[0]])]
    began = time.perf_counter()
    for each in client.generate(chat, max_tokens=1, temperature=0, ignore_eos=True, token_ids=True):
        if each.token_ids:
            break
    return time.perf_counter() - began


def percentiles(gaps: list[float]) -> list[str]:
    """Return the median, the 99th percentile and the maximum of gaps, in milliseconds."""
    ordered = sorted(gaps)
    last = len(ordered) - 1
    return [f"{1000 * ordered[int(share * last)]:.0f}" for share in (0.5, 0.99, 1)]


class Neighbours:
    """Texts that are being generated, each in a thread of its own.

    Args:
        address: The server's address.
        count: Number of texts.
    """

    def __init__(self, address: str, count: int) -> None:
        self._address = address
        self._stopped = False
        self._times: list[list[float]] = [[] for _ in range(count)]
        self._threads = [threading.Thread(target=self._read, args=(each,)) for each in self._times]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        for thread in self._threads:
            thread.join()

    def _read(self, times: list[float]) -> None:
        with Client(self._address) as client:
            while not self._stopped:
                for each in client.generate("abc", max_tokens=900, ignore_eos=True, token_ids=True):
                    if each.token_ids:
                        times.append(time.perf_counter())
                    if self._stopped:
                        break

    def gaps(self, began: float, ended: float) -> list[float]:
        """Return the times between tokens whose end is between two times."""
        return [
            time_ - before
            for times in self._times
            for before, time_ in pairwise(times)
            if began <= time_ <= ended
        ]


if __name__ == "__main__":
    main()
