"""transformers' `generate` on static batches."""

import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from benchmarks.gpu.requests import Requests

PAD = 0


class StaticBatches:
    """A model that generates for a batch until the longest output ends.

    Args:
        folder: The model's folder.
        device: The device that computes.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._model = LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, device_map=device
        )
        self._model.generation_config.eos_token_id = None

    def rate(self, requests: Requests, size: int) -> float | None:
        """Time a batch.

        Args:
            requests: Requests; the first ones fill the batch.
            size: Sequences of the batch; a request has one per output.

        Returns:
            Requested output tokens per second; None if memory does not suffice.
        """
        count = max(1, size // requests.n)
        try:
            self._generate(requests, count, most=2)  # warm-up
            began = time.perf_counter()
            self._generate(requests, count, most=int(requests.outputs[:count].max()))
            seconds = time.perf_counter() - began
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None
        return requests.n * int(requests.outputs[:count].sum()) / seconds

    def _generate(self, requests: Requests, count: int, *, most: int) -> None:
        """Generate `most` tokens for each of the first `count` requests, prompts padded."""
        prompts = requests.tokens[:count]
        longest = max(map(len, prompts))
        ids = torch.full((count, longest), PAD)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        answers = self._model.generate(  # type: ignore[misc]
            ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            max_new_tokens=most,
            do_sample=requests.n > 1,
            top_k=0 if requests.n > 1 else None,  # its default is top-k 50, ours is off
            num_return_sequences=requests.n,
            pad_token_id=PAD,
        )
        answers.cpu()
