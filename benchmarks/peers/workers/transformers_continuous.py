"""transformers' own continuous batching.

It uses the manager, because `generate_batch` has one output length for all requests.
"""

import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from .protocol import Outcome, Request, Runner, Setup, serve

PAGE_TOKENS = 256
NEVER = -1
"""An id that no token has, so that no token ends an output."""


class Continuous:
    """A model, and a manager for each run, because a stopped manager cannot start again."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        shape = self._model.config
        token_bytes = 2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
        self._blocks = int(setup.cache_gib * 2**30 / token_bytes) // PAGE_TOKENS

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Queue all requests, then gather their outputs."""
        generation = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, eos_token_id=NEVER, pad_token_id=2
        )
        batching = ContinuousBatchingConfig(num_blocks=self._blocks, page_size=PAGE_TOKENS)
        with self._model.continuous_batching_context_manager(
            generation, continuous_batching_config=batching
        ) as manager:
            began = time.perf_counter()
            for number, request in enumerate(requests):
                manager.add_request(
                    request.prompt,
                    request_id=str(number),
                    max_new_tokens=request.output_tokens,
                    record_timestamps=True,
                )
            answers: dict[int, GenerationOutput] = {}
            while len(answers) < len(requests):
                answer = manager.get_result(timeout=1)
                if answer is None and not manager.is_running():
                    raise RuntimeError("the manager's thread has ended")
                if answer is not None and answer.is_finished():
                    answers[int(answer.request_id)] = answer
            seconds = time.perf_counter() - began
        ranked = [answers[number] for number in range(len(requests))]
        first = [answer.timestamps[0] - began for answer in ranked if answer.timestamps]
        return Outcome(seconds, [answer.generated_tokens for answer in ranked], first)


def load(setup: Setup) -> Runner:
    """Load the model in bf16."""
    return Continuous(setup)


if __name__ == "__main__":
    serve(load, ["transformers", "torch"])
