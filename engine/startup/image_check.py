"""Checks that a prompt with an image is computed as transformers does, before any is served.

A small twin of the model runs a request with one small image as any other: scheduled in chunks,
its image encoded and placed, and some tokens decoded. The log-probability of each token must be
transformers'. Which tokens attend to which, and at which positions, depends on a model's config and
code, not on its weights, and float32 hides no fault.
"""

import inspect
import itertools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from octavo.common.kv_cache.prefix_hash import ImageSpan
from octavo.common.models.errors import first_line
from octavo.engine.attention.latent import absorb_expansions
from octavo.engine.compilation.load_forward import LoadedForward
from octavo.engine.execution.executor import Executor
from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.models.attention_layers import replace_attention
from octavo.engine.models.checks.remembered import recall, remember
from octavo.engine.models.checks.self_check import SelfCheckError
from octavo.engine.models.checks.trial_image import trial_image
from octavo.engine.models.checks.twin import make_twin
from octavo.engine.models.dimensions import find_dimensions
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.vision import Vision, encode_image, split_vision
from octavo.engine.scheduling.image_encodes import ImageEncodes
from octavo.engine.scheduling.progress import advance, update
from octavo.engine.scheduling.request import PromptImage, Request
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.sequence import new_group
from octavo.engine.scheduling.swap_or_recompute import PreemptionPolicy

log = structlog.get_logger(__name__)

BEFORE, AFTER, DECODED = 7, 6, 3
"""Tokens before and behind the image, and tokens that are decoded."""
TYPES = ("mm_token_type_ids", "token_type_ids")
"""transformers' names of what tells an image's tokens, which have 1, from text."""
PASSED = "images"
"""Name of this check among those that a model has passed."""
LIMIT = 0.005
"""Maximum difference of log-probabilities; float32's rounding makes 0.0001."""


def check_images(loaded: LoadedForward, block_size: int) -> LoadedForward:
    """Check a model that reads images, unless it has passed at an earlier start.

    Args:
        loaded: The model.
        block_size: Tokens per block.

    Returns:
        The model; it reads text alone, which has a check of its own, if no twin of it can be made.

    Raises:
        SelfCheckError: A twin of it computes something else than transformers.
    """
    began = time.perf_counter()
    known = None if loaded.kept is None else recall(loaded.kept)
    if known is not None and PASSED in known.passed:
        return loaded
    assert loaded.eager is not None
    try:
        twin: Any = make_twin(loaded.eager.model)
        trial = _Trial(twin)
    except Exception as error:  # noqa: BLE001 - transformers raises many types
        log.warning("no images: they cannot be checked", why=first_line(error))
        return replace(loaded, vision=None, eager=None)
    expected = trial.expected()
    served = trial.serve(loaded.device, block_size)
    difference = float((served - expected).abs().max())
    if not difference <= LIMIT:  # also for NaN
        raise SelfCheckError(
            "self-check failed: the log-probabilities of a prompt with an image are not those"
            f" of transformers' forward pass: they differ by {difference:.2g}, and the limit is"
            f" {LIMIT}"
        )
    if known is not None and loaded.kept is not None:
        remember(loaded.kept, replace(known, passed=(*known.passed, PASSED)))
    seconds = round(time.perf_counter() - began, 3)
    log.info("self-check of images passed", seconds=seconds, error=float(f"{difference:.2g}"))
    return loaded


class _Trial:
    """A prompt with an image, and a model to run it.

    Args:
        twin: The model, whole.
    """

    @torch.inference_mode()
    def __init__(self, twin: Any) -> None:  # noqa: ANN401
        self._twin = twin
        self._image = trial_image(twin.config)
        self._pixels = {name: torch.from_numpy(array) for name, array in self._image.items()}
        count = encode_image(twin.base_model, self._pixels).shape[1]
        self._places = np.arange(BEFORE, BEFORE + count)
        vocabulary = twin.config.get_text_config().vocab_size
        text = np.random.default_rng(1).integers(vocabulary - 1, size=BEFORE + AFTER).tolist()
        of_image = [twin.config.image_token_id] * count
        self._prompt = [*text[:BEFORE], *of_image, *text[BEFORE:]]
        self._answer = text[-1]

    @torch.inference_mode()
    def expected(self) -> Tensor:
        """Return transformers' log-probabilities of all tokens but the first."""
        tokens = torch.tensor([[*self._prompt, *[self._answer] * DECODED]])
        takes = inspect.signature(self._twin.forward).parameters
        types = (tokens == self._twin.config.image_token_id).long()
        given = {name: types for name in TYPES if name in takes}
        output = self._twin(input_ids=tokens, **self._pixels, **given, use_cache=False)
        scores: Tensor = output.logits[0, :-1].float().log_softmax(-1)
        return scores.gather(1, tokens[0, 1:, None])[:, 0]

    def serve(self, device: torch.device, block_size: int) -> Tensor:
        """Return the same as the engine computes them, in chunks that cut the image if they may."""
        twin = self._twin
        vision = split_vision(twin)
        assert vision is not None
        nn.Module.to(twin, device)
        replace_attention(twin)
        shape = find_dimensions(twin, None)
        absorb_expansions(twin)
        vision.place(device, shape)
        step, kind = EagerForward(twin), torch.float32
        layout = plan_layout(shape, block_size, kind, kind)
        blocks = 2 * sum(layout.sequence_blocks(len(self._prompt) + DECODED))
        budget = len(self._places) + AFTER // 2
        tensors = CacheTensors(
            layout, num_blocks=blocks, num_swap_blocks=0, dtype=kind, device=device
        )
        loaded = LoadedForward(shape, kind, kind, None, device, step, eager=step, vision=vision)
        manager = KVCacheManager(
            num_blocks=blocks,
            groups=layout.groups,
            num_swap_blocks=0,
            prefix_caching=False,
            step_tokens=budget,
        )
        scheduler = Scheduler(
            manager,
            PreemptionPolicy("recompute"),
            max_num_seqs=1,
            max_num_batched_tokens=budget,
            images=ImageEncodes(1, 1, len(self._places) if vision.bidirectional else 0),
        )
        return _run(self._request(vision), scheduler, Executor(loaded, tensors))

    def _request(self, vision: Vision) -> Request:
        span = ImageSpan(BEFORE, BEFORE + len(self._places), b"trial")
        image = PromptImage(span, self._places, self._image)
        return Request(
            session=0,
            request_id="trial",
            prompt=tuple(self._prompt),
            sampling=SamplingParams(
                temperature=0.0,
                allowed_token_ids=[self._answer],
                logprobs=0,
                prompt_logprobs=0,
            ),
            max_tokens=DECODED,
            arrival=0.0,
            images=(image,),
            rotary=vision.rotary_positions(self._prompt, [image]),
        )


def _run(request: Request, scheduler: Scheduler, executor: Executor) -> Tensor:
    """Run a request; return the log-probabilities of its tokens but the first."""
    group = new_group(request, itertools.count())
    scheduler.submit(group)
    decoded: list[float] = []
    while not scheduler.idle:
        batch = scheduler.schedule()
        step = executor.launch(batch, executor.prepare(batch))
        done, failed = executor.take_images()
        if failed:
            raise SelfCheckError("self-check failed: the image cannot be encoded")
        scheduler.images.finish(done, failed)
        executor.sample(step)
        advance(scheduler, batch)
        samples = step.collect()
        update(scheduler, batch, samples)
        decoded += [each.logprob for each in samples.logprobs.values()]
    return torch.tensor([*(each.logprob for each in group.prompt_logprobs), *decoded])
