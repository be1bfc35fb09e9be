"""OpenVINO GenAI: its continuous batching pipeline, stepped by hand to see first tokens."""

import math
import time
from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai as genai

from .protocol import Outcome, Request, Runner, Setup, serve


class OpenVino:
    """A pipeline that reads a GGUF file; it chooses the types of arithmetic and cache."""

    def __init__(self, setup: Setup) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = math.ceil(setup.cache_gib)
        properties = {"INFERENCE_NUM_THREADS": setup.threads}
        self._pipeline = genai.ContinuousBatchingPipeline(setup.model, scheduler, "CPU", properties)

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Add all requests, then step until none is left."""
        outputs: list[list[int]] = [[] for _ in requests]
        first: dict[int, float] = {}
        began = time.perf_counter()
        running = {
            number: self._pipeline.add_request(
                number, openvino.Tensor(np.array([request.prompt])), _config(request)
            )
            for number, request in enumerate(requests)
        }
        handles = dict(running)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - began
            for number, handle in list(running.items()):
                while handle.can_read():
                    first.setdefault(number, now)
                    for output in handle.read().values():
                        outputs[number] += output.generated_ids
                if len(outputs[number]) >= requests[number].output_tokens:
                    del running[number]
        seconds = time.perf_counter() - began
        del handles
        return Outcome(seconds, outputs, [first[number] for number in range(len(requests))])


def _config(request: Request) -> genai.GenerationConfig:
    return genai.GenerationConfig(
        max_new_tokens=request.output_tokens, ignore_eos=True, do_sample=False
    )


def load(setup: Setup) -> Runner:
    """Load the pipeline."""
    return OpenVino(setup)


if __name__ == "__main__":
    serve(load, ["openvino-genai", "openvino"])
