"""Times what a stranger waits for: from a fresh clone to the first tokens of `make demo`.

    python3 benchmarks/clone_to_token.py [SOURCE]

Needs nothing but git, make and Python, as the stranger does. SOURCE is what to
clone, by default this repository as committed. Packages and the demo model come
from the caches of pip and Octavo where they are there, so run it twice for the
figure with warm caches. The demo tells its tokens once a second, so the first is
seen up to a second late.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

STAGES = (
    ("packages installed", re.compile(r"^touch .*installed")),
    ("first tokens", re.compile(r"^[1-9]\d* tokens")),
    ("all answers", re.compile(r"answers at once")),
)


def lines(command: list[str], directory: Path) -> Iterator[str]:
    """Runs a command and yields its lines as they come.

    Raises:
        subprocess.CalledProcessError: it failed; its output has been yielded.
    """
    with subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def main() -> None:
    """Clones, runs and prints the seconds since the start at each stage."""
    source = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory(prefix="octavo-clone-") as directory:
        began = time.monotonic()

        def tell(stage: str) -> None:
            print(f"{time.monotonic() - began:7.1f} s  {stage}", flush=True)

        subprocess.run(["git", "clone", "--quiet", source, "octavo"], cwd=directory, check=True)
        tell("cloned")
        waiting = list(STAGES)
        output = []
        try:
            for line in lines(["make", "demo"], Path(directory, "octavo")):
                output.append(line)
                for stage in [stage for stage in waiting if stage[1].search(line)]:
                    waiting.remove(stage)
                    tell(stage[0])
        except subprocess.CalledProcessError:
            sys.exit("".join(output))


if __name__ == "__main__":
    main()
