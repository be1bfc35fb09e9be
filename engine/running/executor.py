"""The executor: does a batch's copies, runs the model on it and draws tokens."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch

from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.compilation import CompiledStep
from octavo.engine.compilation.load_step import LoadedStep
from octavo.engine.kv_cache import Transfers
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.memory.swap import CopyTime
from octavo.engine.running.cuda_graphs import DecodeGraphs, Record, graph_memory, ladder
from octavo.engine.running.inputs import StepInputs, idle_inputs, prepare
from octavo.engine.running.pending_step import Launched
from octavo.engine.sampling.sampler import (
    Drawer,
    Report,
    are_plain,
    choose_rows,
    continue_beams,
    draw_plainly,
    sample,
)
from octavo.engine.scheduling.batch import Batch, Draw, StepResult
from octavo.engine.scheduling.sequence import TokenLogprob
from octavo.kernels.host import to_device
from octavo.kernels.ops import draw_tokens
from octavo.kernels.sampling_tensors import SamplingTensors

SCORED_ROWS = 256
"""Rows of prompt logits turned into log-probabilities at a time."""


class Executor:
    """A model and the tensors of its paged KV cache.

    Attributes:
        cache: those tensors.
    """

    def __init__(self, loaded: LoadedStep, cache: CacheTensors) -> None:
        self.cache = cache
        self._loaded = loaded
        self._device = loaded.device
        self._block_size = cache.device.shape[4]
        self._decodes: DecodeGraphs | None = None
        self._eager_before = 0
        self._plan = loaded.shape.planner(loaded.dtype, loaded.cache_dtype, loaded.device)

    @property
    def asynchronous(self) -> bool:
        """Whether steps go on by themselves once they are launched."""
        return self._device.type == "cuda"

    @torch.inference_mode()
    def launch(
        self,
        batch: Batch,
        *,
        after: Launched | None = None,
        launching: Callable[[], None] = lambda: None,
    ) -> Launched:
        """Has one step run: on a GPU by itself from then on, on a CPU before this returns.

        Args:
            batch: what it computes.
            after: the step before it, if not all that it draws was known to who made the
                batch: such tokens are taken from there.
            launching: called when the model is about to run: for what may go on
                meanwhile, in threads that then have the interpreter to themselves.

        Returns:
            Launched: its result has a token for each of the batch's samplers, and the
                prompt log-probabilities that were asked for.
        """
        self.cache.apply(batch.transfers)
        if not batch.slices:
            launching()
            return Launched()
        inputs = self._prepare(batch)
        if after is not None:
            after.fill_in(batch, inputs.token_ids)
        rows, drawers = [], []
        beam_rows, beams = [], []
        for i, row in inputs.sampled.items():
            part = batch.slices[i]
            if part.group.beam:
                beam_rows.append(row)
                beams.append(Drawer(part.group, part.sequence))
                continue
            rows += [row] * len(part.samplers)
            drawers += [Drawer(part.group, sequence) for sequence in part.samplers]
        only_plain = not (beams or inputs.scored) and are_plain(drawers)
        launching()
        if only_plain and (tokens := self._most_likely(inputs)) is not None:
            return Launched(draw_plainly([tokens[row] for row in rows], drawers))
        logits = self._forward(inputs)
        prompt_logprobs = {
            i: self._score(logits, row, batch, i) for i, row in inputs.scored.items()
        }
        drawn = sample(_rows(logits, rows), drawers) if drawers else list[Draw]()
        continuations = continue_beams(_rows(logits, beam_rows), beams) if beams else {}
        return Launched(drawn, continuations, prompt_logprobs)

    def execute(self, batch: Batch) -> StepResult:
        """Runs one step by itself; see `launch`."""
        return self.launch(batch).result()

    def device_lost(self) -> bool:
        """Return whether the device computes nothing any more, as after some CUDA errors.

        Such an error is sticky: every later call in this process fails with it.
        """
        if self._device.type != "cuda":
            return False
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return True
        return False

    @property
    def compiled(self) -> bool:
        """Whether steps run compiled by now."""
        return self._loaded.compiled

    @property
    def eager_steps(self) -> int:
        """How many steps since the start ran uncompiled although the model is compiled."""
        return self._loaded.eager_steps - self._eager_before

    def take_copy_times(self) -> list[CopyTime]:
        """How long swaps took, of those that are known to have ended since the last call."""
        return self.cache.take_copy_times()

    @torch.inference_mode()
    def warm_up(self, max_model_len: int) -> None:
        """Launches each kernel that a step may need: Triton compiles it then, for seconds.

        A decode alone, a decode beside a prompt's chunk, draws of their tokens, and a copy
        of a block, while the cache holds nothing yet.

        Args:
            max_model_len: most tokens of a sequence.
        """
        for query_lens in ([1], [1, 2]):
            inputs = idle_inputs(
                np.array(query_lens, np.int32),
                longest=max_model_len,
                device=self._device,
                plan=self._plan,
            )
            logits = self._forward(inputs).float()
            draw_tokens(
                logits,
                SamplingTensors.greedy(len(logits))._replace(temperatures=np.ones(len(logits))),
            )
        if len(self.cache.device) > 1:
            self.cache.apply(Transfers(copies=[(0, 1)]))
        self._eager_before = self._loaded.eager_steps  # the lone decode

    @torch.inference_mode()
    def record_decodes(self, *, max_num_seqs: int, max_model_len: int, record: Record) -> None:
        """Has steps that only decode replayed from now on; see `cuda_graphs`.

        Args:
            max_num_seqs: most sequences in a batch.
            max_model_len: most tokens of a sequence.
            record: records a step.

        Raises:
            RuntimeError: the device cannot record the model.
        """
        self._decodes = self._record(ladder(max_num_seqs), max_model_len, record)

    @torch.inference_mode()
    def measure_decodes(
        self, *, max_num_seqs: int, max_model_len: int, record: Record, free: Callable[[], int]
    ) -> int:
        """Return the bytes that `record_decodes` will take on the device; record nothing.

        Args:
            max_num_seqs: most sequences in a batch.
            max_model_len: most tokens of a sequence.
            record: records a step.
            free: returns the bytes that are free on the device.

        Raises:
            RuntimeError: the device cannot record the model.
        """
        return graph_memory(
            ladder(max_num_seqs),
            lambda sizes, record: self._record(sizes, max_model_len, record),
            record,
            free,
        )

    def _record(self, sizes: list[int], max_model_len: int, record: Record) -> DecodeGraphs:
        return DecodeGraphs(
            self._loaded.step,
            self.cache.layers,
            self._loaded.kv_scales,
            sizes=sizes,
            max_model_len=max_model_len,
            block_size=self._block_size,
            device=self._device,
            plan=self._plan,
            record=record,
        )

    def _prepare(self, batch: Batch) -> StepInputs:
        return prepare(batch, block_size=self._block_size, device=self._device, plan=self._plan)

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits `[num_rows, vocab_size]` of the wanted tokens."""
        if self._decodes is not None and (logits := self._decodes.run(inputs)) is not None:
            return logits
        with self._attending(inputs):
            return self._loaded.step(inputs.token_ids, inputs.positions, inputs.logit_rows)

    def _most_likely(self, inputs: StepInputs) -> list[int] | None:
        """The most likely one for each of those tokens; None where that must be looked for."""
        step = self._loaded.step
        if not isinstance(step, CompiledStep):
            return None
        with self._attending(inputs):
            return step.most_likely(inputs.token_ids, inputs.positions, inputs.logit_rows)

    def _attending(self, inputs: StepInputs) -> AbstractContextManager[None]:
        return attending(PagedStep(inputs.metadata, self.cache.layers, self._loaded.kv_scales))

    def _score(self, logits: torch.Tensor, row: int, batch: Batch, i: int) -> list[TokenLogprob]:
        """Prompt log-probabilities of one slice, a few rows at a time to bound memory."""
        part = batch.slices[i]
        count = part.group.request.sampling.prompt_logprobs or 0
        targets = [part.sequence.token_ids[position + 1] for position in part.scored]
        scores: list[TokenLogprob] = []
        for first in range(0, len(targets), SCORED_ROWS):
            chunk = targets[first : first + SCORED_ROWS]
            rows = logits[row + first : row + first + len(chunk)]
            tokens = to_device(np.array(chunk), self._device)
            scores += Report(rows, tokens, [count] * len(chunk)).logprobs()
        return scores


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Those rows; the tensor itself if they are all of it in order."""
    return logits if rows == list(range(len(logits))) else choose_rows(logits, rows)
