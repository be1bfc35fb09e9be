"""The executor: copies a batch's blocks, runs the model on it and samples tokens."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.compilation.load_forward import LoadedForward
from octavo.engine.compilation.traced_forward import TracedForward
from octavo.engine.execution.cuda_graphs import Record
from octavo.engine.execution.graph_sizes import GraphSize
from octavo.engine.execution.image_encoder import ImageEncoder
from octavo.engine.execution.inputs import (
    LONGER_CHUNK,
    StepInputs,
    idle_arrays,
    make_inputs,
    to_inputs,
    warm_up_sizes,
)
from octavo.engine.execution.leader import Leader
from octavo.engine.execution.pending_step import PendingStep
from octavo.engine.execution.rank_images import share_images
from octavo.engine.execution.rank_messages import Kind
from octavo.engine.execution.recorded_steps import NO_GRAPH, RecordedSteps
from octavo.engine.kv_cache import Transfers
from octavo.engine.lora.adapter import Adapter
from octavo.engine.lora.device_adapters import DeviceAdapters
from octavo.engine.lora.weights import blank_weights
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.models.forward import Forward
from octavo.engine.models.linear.adapted_layers import applying
from octavo.engine.models.sharding.rank_forward import RankForward
from octavo.engine.sampling.reports import Report
from octavo.engine.sampling.sampler import (
    continue_beams,
    masks_of,
    reads_placeholders,
    sample,
)
from octavo.engine.scheduling.batch import Batch, Samples, ScheduledSequence
from octavo.engine.scheduling.image_encodes import ImageKey
from octavo.kernels.host_copies import to_device
from octavo.kernels.logits import draw_tokens, mask_logits
from octavo.kernels.sampling_tensors import SamplingTensors

SCORED_ROWS = 256
"""Rows of prompt logits that are converted to log-probabilities at a time."""


class Executor:
    """A model and the tensors of its paged KV cache.

    Attributes:
        cache: The cache's tensors.
    """

    def __init__(
        self,
        loaded: LoadedForward,
        cache: CacheTensors,
        leader: Leader | None = None,
        adapters: DeviceAdapters | None = None,
    ) -> None:
        """Set up the executor.

        Args:
            loaded: The model, or this rank's part of it.
            cache: The cache's tensors.
            leader: Sends steps to the other ranks, if there are any.
            adapters: The adapters on the device, if the model takes any.
        """
        self.cache = cache
        self._leader = leader
        self._adapters = adapters
        self._loaded = loaded
        self._device = loaded.device
        self._eager_before = 0
        self._encoder = None if loaded.vision is None else ImageEncoder(loaded.vision)
        self._shapes = cache.layout.attention_shapes(
            loaded.dtype, loaded.cache_dtype, loaded.device
        )
        self._recorded = RecordedSteps(
            loaded, cache, self._shapes, takes_adapters=adapters is not None
        )

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self._device

    @property
    def asynchronous(self) -> bool:
        """Whether `launch` returns before the step is computed."""
        return self._device.type == "cuda"

    @torch.inference_mode()
    def prepare(self, batch: Batch, previous: PendingStep | None = None) -> StepInputs | None:
        """Copy a batch's blocks and convert its sequences to tensors.

        Args:
            batch: The batch.
            previous: The previous step, if its tokens are not collected yet: it fills in this
                step's placeholders.

        Returns:
            The step's inputs; None for a batch that only copies blocks.
        """
        if not batch.num_sequences:
            if self._leader is not None:
                self._leader.copy(batch.transfers)
            self.cache.apply(batch.transfers)
            return None
        arrays, inputs = make_inputs(
            batch,
            layout=self.cache.layout,
            device=self._device,
            shapes=self._shapes,
            mutual=self._loaded.vision is not None and self._loaded.vision.bidirectional,
        )
        adapters: list[object] = []
        if self._adapters is not None:
            adapters = [group.request.adapter for group in batch.groups]
            spans = list(zip(adapters, arrays.query_lens.tolist(), strict=True))
            inputs = replace(inputs, adapters=self._adapters.lay_out(spans, arrays.rows))
        inputs = replace(inputs, graph=self._recorded.choose(inputs))
        filled = previous is not None and any(s.num_placeholders for s in batch.sequences)
        if self._leader is not None:
            self._leader.run(
                batch.transfers,
                arrays,
                most_likely=inputs.take_greatest and not inputs.samples.constrained,
                adapters=() if inputs.adapters is None else adapters,
                graph=inputs.graph,
                filled=filled,
                has_images=inputs.images is not None,
            )
        self.cache.apply(batch.transfers)
        if previous is not None and filled:
            previous.fill_placeholders(batch, inputs.token_ids)
            if self._leader is not None:
                self._leader.world.broadcast(inputs.token_ids)
        return inputs

    @torch.inference_mode()
    def launch(
        self, batch: Batch, inputs: StepInputs | None, late: Collection[int] | None = ()
    ) -> PendingStep:
        """Encode images and launch the forward pass; call `sample` before the next launch.

        On a GPU it returns at once, while the step continues. On a CPU it returns when the model
        has run; other threads get the interpreter meanwhile.

        Args:
            batch: The batch.
            inputs: The batch's inputs from `prepare`.
            late: Ids of sequences whose masks are not ready; None: `sample` reads all masks. If the
                model itself samples, a mask that becomes ready while it runs is also late.
        """
        if self._encoder is not None:
            self._encoder.encode(batch.images, batch.dropped_images)
        if inputs is None:
            return PendingStep(batch)
        if isinstance(self._loaded.forward, RankForward):
            return PendingStep(batch, inputs, columns=self._columns(self._loaded.forward, inputs))
        if inputs.take_greatest and (late is not None or not batch.constrained):
            greatest = self._most_likely(inputs, late or ())
            if greatest is not None:
                return PendingStep(batch, inputs, greatest=greatest, late=late or ())
        return PendingStep(batch, inputs, self._forward(inputs))

    @torch.inference_mode()
    def sample(self, step: PendingStep, left_out: Collection[int] = ()) -> None:
        """Sample the tokens of a launched step; on a GPU this does not wait.

        Args:
            step: The step, which gets its tokens.
            left_out: Ids of sequences that get no token.
        """
        inputs, forward = step.inputs, self._loaded.forward
        if inputs is None:
            return
        greatest: torch.Tensor | None = None
        if step.columns is not None:
            assert isinstance(forward, RankForward)
            if inputs.take_greatest and not inputs.samples.constrained:
                greatest = forward.most_likely(step.columns)
            else:
                step.logits = forward.logits(step.columns)
        elif step.greatest is not None:
            greatest = torch.tensor(step.greatest, dtype=torch.int64)
        logits = step.logits
        samples, rows = inputs.samples, inputs.sample_rows
        if left_out:
            kept = [i for i, s in enumerate(samples.sequences) if s.id not in left_out]
            samples.keep(kept)
            rows = [rows[i] for i in kept]
        if logits is None:
            assert greatest is not None
            chosen = to_device(np.array(rows, np.int64), greatest.device)
            step.set_tokens(samples, greatest.index_select(0, chosen))
            return
        scores = [(each.group, self._score(logits, row, each)) for each, row in inputs.scored]
        continued = None
        if inputs.beams:
            continued = continue_beams(logits, inputs.beams, inputs.beam_rows)
        tokens, reports = torch.empty(0, dtype=torch.int64), None
        if rows:
            before: torch.Tensor | None = None
            if reads_placeholders(samples):
                before = inputs.token_ids[0].index_select(0, inputs.logit_rows)
            tokens, reports = sample(logits, samples, rows, before)
        step.set_tokens(samples, tokens, reports, continued=continued, scores=scores)

    def execute(self, batch: Batch) -> Samples:
        """Run one step by itself, and wait for it."""
        step = self.launch(batch, self.prepare(batch))
        self.sample(step)
        return step.collect()

    def spill_failed(self) -> bool:
        """Return whether the spilled sequence's last results are wrong, as its file failed."""
        return self.cache.spill is not None and self.cache.spill.take_failed()

    def device_lost(self) -> bool:
        """Return whether the device can no longer compute, as after some GPU errors.

        Such an error is sticky: every later call in this process fails with it. With several ranks
        every error counts as sticky, as the others may be in the middle of the step.
        """
        if self._leader is not None:
            return True
        if self._device.type != "cuda":
            return False
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return True
        return False

    @property
    def compiled(self) -> bool:
        """Whether steps currently run compiled."""
        return self._loaded.compiled

    @property
    def eager_steps(self) -> int:
        """Steps since the start that ran uncompiled although the model is compiled."""
        return self._loaded.eager_steps - self._eager_before

    def take_copy_times(self) -> list[tuple[int, float]]:
        """Return the numbers of blocks and seconds of the swaps that ended since the last call."""
        return self.cache.swapper.take_times()

    @torch.inference_mode()
    def warm_up(self, max_model_len: int, max_num_batched_tokens: int) -> None:
        """Launch each kernel that a step may need, so that Triton compiles it now, for seconds.

        It runs a decode alone, one beside a chunk of a prompt, and more and more decodes, all
        also with an adapter of all layers if there are no other ranks; sampling of their tokens,
        with masks; and a block copy.
        Call it while the cache is empty.

        Args:
            max_model_len: Maximum number of tokens of a sequence.
            max_num_batched_tokens: Maximum number of tokens of a step.
        """
        decodes = ([1] * count for count in warm_up_sizes(max_num_batched_tokens))
        longer = max(2, min(LONGER_CHUNK, max_num_batched_tokens - 1))
        for query_lens in ([1], [1, 2], [1, longer], *decodes):
            arrays = idle_arrays(query_lens, self.cache.layout)
            arrays = replace(arrays, rows=arrays.rows[:2])  # few logits, which need much memory
            if self._leader is not None:
                self._leader.run(Transfers(), arrays, most_likely=False, longest=max_model_len)
            inputs = to_inputs(
                arrays, device=self._device, shapes=self._shapes, longest=max_model_len
            )
            if self._loaded.targets and self._adapters and self._leader is None:
                blank = Adapter("", Path(), blank_weights(self._loaded.targets))
                spans = [(blank, count) for count in query_lens]
                adapters = self._adapters.lay_out(spans, arrays.rows)
                self._forward(replace(inputs, adapters=adapters))
            logits = self._forward(inputs).float()
            draw_tokens(
                logits,
                SamplingTensors.greedy(len(logits))._replace(temperatures=np.ones(len(logits))),
            )
            mask_logits(logits, range(len(logits)), np.zeros((len(logits), 1), np.int32))
        if len(self.cache.device) > 1:
            first = Transfers(copies=[(0, 1)])
            if self._leader is not None:
                self._leader.copy(first)
            self.cache.apply(first)
        self._eager_before = self._loaded.eager_steps  # the lone decode

    @torch.inference_mode()
    def record_graphs(self, sizes: list[GraphSize], max_model_len: int, record: Record) -> None:
        """Record steps on all ranks, to replay them from now on; see `RecordedSteps.record`."""
        if self._leader is not None:
            record = self._leader.record(Kind.RECORD, sizes, max_model_len, record)
        self._recorded.record(sizes, max_model_len, record)

    @torch.inference_mode()
    def measure_graphs(
        self, sizes: list[GraphSize], max_model_len: int, record: Record, free: Callable[[], int]
    ) -> int:
        """Return the bytes that `record_graphs` takes here; see `RecordedSteps.measure`.

        Other ranks keep theirs until they count the blocks that fit.
        """
        if self._leader is not None:
            record = self._leader.record(Kind.MEASURE, sizes, max_model_len, record)
        return self._recorded.measure(sizes, max_model_len, record, free)

    def close(self) -> None:
        """End the thread of an image that is being encoded."""
        if self._encoder is not None:
            self._encoder.end()

    def take_images(self) -> tuple[Collection[ImageKey], Collection[ImageKey]]:
        """Return the images encoded since the last call, and those that the encoder failed on."""
        return ((), ()) if self._encoder is None else self._encoder.take_ended()

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        """Return logits `[num_rows, vocab_size]` of the needed tokens."""
        if inputs.graph != NO_GRAPH:
            return self._recorded.replay(inputs.graph, inputs)
        run = self._with_images(inputs) or self._loaded.forward
        with self._attending(inputs):
            return run(inputs.token_ids, inputs.positions, inputs.logit_rows)

    def _with_images(self, inputs: StepInputs) -> Forward | None:
        """Return the forward pass with the step's image embeddings; None for a step without."""
        images, eager = inputs.images, self._loaded.eager
        if images is None:
            return None
        assert eager is not None
        assert self._encoder is not None
        encoded = self._encoder.embeddings
        embeddings = torch.cat([encoded[key][:, part] for key, part in images.parts], 1)
        if self._leader is not None:
            share_images(self._leader.world, images, embeddings)
        return partial(eager.with_images, rows=images.rows, embeddings=embeddings)

    def _columns(self, forward: RankForward, inputs: StepInputs) -> torch.Tensor:
        """Return this rank's columns of logits of the needed tokens."""
        if inputs.graph != NO_GRAPH:
            return self._recorded.replay(inputs.graph, inputs)
        run = self._with_images(inputs)
        with self._attending(inputs):
            return forward.begin(inputs.token_ids, inputs.positions, inputs.logit_rows, run)

    def _most_likely(self, inputs: StepInputs, late: Collection[int]) -> list[int] | None:
        """Return the most likely next token of each needed row; None if the step gives logits."""
        forward = self._loaded.forward
        if inputs.images is not None:
            return None
        arguments = inputs.token_ids, inputs.positions, inputs.logit_rows
        with self._attending(inputs):
            if isinstance(forward, TracedForward):
                # New outputs share a row. They have no tokens yet, so their masks are equal.
                samples, rows = inputs.samples, inputs.sample_rows
                ready = [i for i in samples.constrained if samples.sequences[i].id not in late]
                masks = masks_of(samples, ready)
                return forward.most_likely(*arguments, {rows[i]: m for i, m in masks.items()})
        return None

    @contextmanager
    def _attending(self, inputs: StepInputs) -> Iterator[None]:
        """Set the step's batch, cache and adapters, and read its spilled blocks."""
        cache, scales = self.cache, self._loaded.kv_scales
        step = PagedStep(inputs.groups, cache.layers, scales, cache.states)
        reading: AbstractContextManager[None] = nullcontext()
        if inputs.spilled is not None:
            assert cache.spill is not None
            reading = cache.spill.reading(*inputs.spilled)
        with attending(step), applying(inputs.adapters), reading:
            yield

    def _score(self, logits: torch.Tensor, row: int, scheduled: ScheduledSequence) -> list[Report]:
        """Return a scheduled sequence's prompt log-probabilities, a few rows per report."""
        count = scheduled.group.request.sampling.prompt_logprobs or 0
        token_ids = scheduled.sequence.token_ids
        targets = [token_ids[position + 1] for position in scheduled.scored]
        reports: list[Report] = []
        for first in range(0, len(targets), SCORED_ROWS):
            chunk = targets[first : first + SCORED_ROWS]
            rows = logits[row + first : row + first + len(chunk)]
            tokens = to_device(np.array(chunk), self._device)
            reports.append(Report(rows, tokens, [count] * len(chunk)))
        return reports
