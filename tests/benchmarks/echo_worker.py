"""A worker of the peer benchmark that repeats its prompt; its options make it fail."""

import subprocess
import sys
import time

from benchmarks.peers.workers.protocol import Outcome, serve


class Echo:
    def __init__(self, setup):
        self.setup = setup
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def run(self, requests):
        print("what a library prints")
        subprocess.run(["echo", "what its children print"], check=True)
        match self.setup.options.get("fault"):
            case "run":
                raise RuntimeError("no luck")
            case "one output less":
                requests = requests[1:]
            case "die":
                sys.exit("gone")
            case "one token less":
                return Outcome(0.5, [r.prompt[: r.output_tokens - 1] for r in requests])
        outputs = [(r.prompt * r.output_tokens)[: r.output_tokens] for r in requests]
        return Outcome(0.5, outputs, [0.1] * len(requests), f"child {self.child.pid}")


def load(setup):
    match setup.options.get("fault"):
        case "load":
            raise ValueError(f"cannot load {setup.model}")
        case "hang":
            time.sleep(600)
    return Echo(setup)


if __name__ == "__main__":
    serve(load, ["rich"])
