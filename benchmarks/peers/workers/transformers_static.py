"""transformers' `generate` on padded batches: each ends with its longest output."""

import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from .protocol import Outcome, Request, Runner, Setup, serve

BATCH_SIZES = (8, 16, 48)
PAD = 2


class Static:
    """A model that runs requests in batches of the fastest size.

    The first run of many requests tries each of `BATCH_SIZES` and returns the best outcome; later
    runs use the best one.
    """

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self._model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.bfloat16)
        self._model.generation_config.eos_token_id = None
        self._size: int | None = None

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Run batch after batch."""
        if len(requests) == 1:
            return self._run(requests, 1)
        if self._size is not None:
            return self._run(requests, self._size)
        sizes = {min(size, len(requests)) for size in BATCH_SIZES}
        tried = {size: self._run(requests, size) for size in sizes}
        self._size = min(tried, key=lambda size: tried[size].seconds)
        return tried[self._size]

    def _run(self, requests: Sequence[Request], size: int) -> Outcome:
        outputs: list[list[int]] = []
        began = time.perf_counter()
        for start in range(0, len(requests), size):
            outputs += self._batch(requests[start : start + size])
        return Outcome(time.perf_counter() - began, outputs, note=f"batches of {size}")

    def _batch(self, batch: Sequence[Request]) -> list[list[int]]:
        longest = max(len(request.prompt) for request in batch)
        ids = torch.full((len(batch), longest), PAD)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        answers = self._model.generate(  # type: ignore[misc]
            ids,
            attention_mask=mask,
            max_new_tokens=max(request.output_tokens for request in batch),
            do_sample=False,
            pad_token_id=PAD,
        )
        return [
            answer[longest : longest + request.output_tokens].tolist()
            for answer, request in zip(answers, batch, strict=True)
        ]


def load(setup: Setup) -> Runner:
    """Load the model in bf16."""
    return Static(setup)


if __name__ == "__main__":
    serve(load, ["transformers", "torch"])
