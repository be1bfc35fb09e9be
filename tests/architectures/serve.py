"""Serve one tiny model under memory pressure and hold it to eager transformers."""

import random
from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from octavo.common.layer_groups import blocks_held
from octavo.common.models.errors import ModelError
from octavo.engine.capacity import StartupError
from octavo.engine.models.attention_layers import reference_attention
from octavo.engine.scheduling.sequence import SequenceGroup
from octavo.engine.scheduling.swap_or_recompute import PreemptionMode, PreemptionPolicy
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import build
from tests.architectures.entries import Entry
from tests.architectures.tiny import (
    FIRST_TOKEN,
    VOCABULARY,
    make_model,
    tiny_config,
)
from tests.engine.stepper import Stepper

BLOCK_SIZE = 8
CROWDINGS = (1.6, 1.4, 1.3, 2.0)
"""Blocks, as multiples of what the longest request takes: too few for all. With the first at which
requests are preempted in both ways, they are served."""
BATCHED_TOKENS = 24
"""In a step: most prompts are prefilled in several chunks, beside others' decodes."""
LENGTHS = (5, 60, 33, 17, 48)
OUTPUT_TOKENS = 18
SHARED_TOKENS = 40
"""Tokens of the longest prompt with which another begins."""
TOLERANCE = 1e-3
"""Of a log-probability: sums in another order differ by under 1e-4, another prompt by 2e-2."""


class Outcome(StrEnum):
    """What became of an entry."""

    RIGHT = "right"
    REFUSED = "refused"  # at start, with a message of one line
    WRONG = "wrong"  # accepted, and other tokens or log-probabilities than eager's
    CRASHED = "crashed"  # at start, with any other exception
    FAILED = "failed"  # accepted, and a step raised
    NO_CONFIG = "no config"  # the tiny model could not be made: the harness' own fault


@dataclass(slots=True)
class Finding:
    """An entry's outcome.

    Attributes:
        name: of the entry.
        outcome: what became of it.
        detail: the refusal, the exception, or where it differs.
        error: the largest difference of a log-probability.
        tokens: how many tokens were compared.
        preemptions: how many were swapped out and how many dropped.
        seconds: that it took.
    """

    name: str
    outcome: Outcome
    detail: str = ""
    error: float | None = None
    tokens: int = 0
    preemptions: tuple[int, int] = (0, 0)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON has it."""
        return asdict(self)


def examine(entry: Entry, directory: Path) -> Finding:
    """Make the entry's model in a directory, serve it and compare.

    Returns:
        Its outcome, without the time that it took.
    """
    try:
        save(entry, directory)
    except Exception as error:  # noqa: BLE001 - config classes raise anything
        return Finding(entry.name, Outcome.NO_CONFIG, _described(error))
    try:
        engine = start(directory, entry.max_model_len)
    except (ModelError, StartupError) as error:
        plain = "\n" not in str(error)
        return Finding(entry.name, Outcome.REFUSED if plain else Outcome.CRASHED, str(error))
    except Exception as error:  # noqa: BLE001 - that is what the sweep looks for
        return Finding(entry.name, Outcome.CRASHED, _described(error))
    most = engine.parts.limits.max_model_len
    if most < max(LENGTHS) + OUTPUT_TOKENS:
        detail = f"it takes no request of more than {most} tokens"
        return Finding(entry.name, Outcome.REFUSED, detail)
    try:
        crowded, groups = serve_crowded(directory, entry.max_model_len, engine)
        groups |= dict.fromkeys(serve_with_common_beginning(engine), engine)
    except Exception as error:  # noqa: BLE001 - likewise
        return Finding(entry.name, Outcome.FAILED, _described(error.__cause__ or error))
    return compare(entry.name, directory, groups, preemptions(crowded))


def save(entry: Entry, directory: Path) -> None:
    """Write the entry's tiny model, or where there is none its config without weights."""
    config = tiny_config(entry.model_type, entry.overrides)
    if not entry.has_model:
        config.save_pretrained(directory)
        save_file({}, directory / "model.safetensors", {"format": "pt"})
        return
    model = make_model(config)
    model.save_pretrained(directory)
    config.save_pretrained(directory)  # of several models, where the model's own is of one
    eager = _logprobs(_eager(directory), list(range(FIRST_TOKEN, FIRST_TOKEN + max(LENGTHS))))
    assert eager.isfinite().all(), "the tiny model's own outputs are not finite"


def start(directory: Path, max_model_len: int | None = None, num_blocks: int = 512) -> Stepper:
    """Start an engine of a directory's model, as an operator would."""
    return Stepper(build(_settings(directory, max_model_len, num_blocks)))


def _settings(directory: Path, max_model_len: int | None, num_blocks: int) -> EngineSettings:
    return EngineSettings(
        model=str(directory),
        device="cpu",
        dtype="float32",
        compile="off",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        swap_space=0.02,
        max_num_seqs=8,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_model_len=max_model_len,
    )


def serve_crowded(
    directory: Path, max_model_len: int | None, ample: Stepper
) -> tuple[Stepper, dict[SequenceGroup, Stepper]]:
    """Serve with too few blocks for all; return the engine, and each group with its engine.

    States do not grow, so what keeps nothing else is never preempted: it waits for blocks.

    Raises:
        StepError: a step failed.
        NothingPreemptedError: whatever the number of blocks.
    """
    (budget,) = ample.parts.limits.budgets
    grows = not all(group.state_blocks for group in budget.groups)
    least = blocks_held(budget.groups, max(LENGTHS) + OUTPUT_TOKENS, BATCHED_TOKENS)
    for crowding in CROWDINGS:
        engine = start(directory, max_model_len, int(crowding * least))
        try:
            return engine, serve(engine, must_preempt=grows)
        except NothingPreemptedError:
            if crowding == CROWDINGS[-1]:
                raise
    raise AssertionError


class NothingPreemptedError(Exception):
    """There were blocks for all."""


def serve(engine: Stepper, *, must_preempt: bool = True) -> dict[SequenceGroup, Stepper]:
    """Serve prompts together, once for each way to preempt.

    Returns:
        The groups, each with its engine.

    Raises:
        StepError: a step failed.
        NothingPreemptedError: nothing was preempted in one of the ways, and `must_preempt`.
    """
    draw = random.Random(1)
    prompts = [[_token(draw) for _ in range(length)] for length in LENGTHS]
    groups = []
    for mode in ("swap", "recompute"):
        before = preemptions(engine)
        groups += _serve_preempting(engine, mode, prompts)
        after = preemptions(engine)
        if must_preempt and after[mode == "recompute"] == before[mode == "recompute"]:
            raise NothingPreemptedError(f"no {mode} happened")
    return dict.fromkeys(groups, engine)


def serve_with_common_beginning(engine: Stepper) -> list[SequenceGroup]:
    """Serve three prompts with one beginning, one after the other.

    Raises:
        StepError: a step failed.
        AssertionError: the third's beginning was computed again.
    """
    draw, groups = random.Random(2), []
    longest = [_token(draw) for _ in range(max(LENGTHS))]
    # The state at the end of what prompts share is kept when it is seen the second time.
    tails = [[_token(draw) for _ in range(len(longest) - SHARED_TOKENS)] for _ in range(2)]
    for prompt in (longest, *(longest[:SHARED_TOKENS] + tail for tail in tails)):
        groups.append(engine.submit(prompt, OUTPUT_TOKENS, logprobs=0))
        engine.run()
    assert groups[-1].cached_tokens >= SHARED_TOKENS - BLOCK_SIZE, "no prefix was reused"
    return groups


def _serve_preempting(
    engine: Stepper, mode: PreemptionMode, prompts: Tokens[list[int]]
) -> list[SequenceGroup]:
    """Serve all at once; every other one with the log-probabilities of its prompt."""
    engine.scheduler.policy = PreemptionPolicy(mode)
    engine.cache.forget_contents()
    groups = [
        engine.submit(prompt, OUTPUT_TOKENS, logprobs=0, prompt_logprobs=(None, 0)[i % 2])
        for i, prompt in enumerate(prompts)
    ]
    engine.run()
    return groups


def _token(draw: random.Random) -> int:
    return draw.randrange(FIRST_TOKEN, VOCABULARY)


def preemptions(engine: Stepper) -> tuple[int, int]:
    """Return how many groups were swapped out and how many dropped, so far."""
    counters = engine.scheduler.counters
    return counters.preemptions_swap, counters.preemptions_recompute


def compare(
    name: str,
    directory: Path,
    groups: Mapping[SequenceGroup, Stepper],
    preempted: tuple[int, int],
) -> Finding:
    """Hold every token to eager transformers, one whole forward for each sequence.

    What was served is given to the forward, so a token is right where it is the most likely one
    after the tokens before it.
    """
    model = _eager(directory)
    known: dict[tuple[int, ...], torch.Tensor] = {}
    worst, tokens, wrong = 0.0, 0, 0
    for group, engine in groups.items():
        served = group.sequences[0].token_ids
        if tuple(served) not in known:
            known[tuple(served)] = _logprobs(model, served)
        errors = _errors(group, engine, known[tuple(served)])
        worst = max(worst, *errors)
        tokens += len(errors)
        wrong += sum(not error <= TOLERANCE for error in errors)
    return Finding(
        name,
        Outcome.WRONG if wrong else Outcome.RIGHT,
        f"{wrong} of {tokens} tokens are not eager's" if wrong else "",
        worst,
        tokens,
        preempted,
    )


def _eager(directory: Path) -> PreTrainedModel:
    attention = reference_attention(AutoConfig.from_pretrained(directory))
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=attention
    ).eval()


@torch.inference_mode()
def _logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return eager log-probabilities `[num_tokens - 1, vocab_size]`, of each next token."""
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1)


def _errors(group: SequenceGroup, engine: Stepper, eager: torch.Tensor) -> list[float]:
    """Return by how much each token that was told of differs from eager.

    That is the difference of its log-probability, or how much less likely it is than the most
    likely one, where it was drawn.
    """
    (sequence,) = group.sequences
    told = dict(enumerate(group.prompt_logprobs, 1))
    drawn = [token.logprob for token in engine.sampled if token.group is group]
    told |= dict(enumerate(drawn, sequence.num_prompt))
    assert len(drawn) == OUTPUT_TOKENS
    assert len(told) in {OUTPUT_TOKENS, sequence.num_tokens - 1}
    errors = []
    for at, found in told.items():
        assert found is not None
        row = eager[at - 1]
        error = abs(found.logprob - row[sequence.token_ids[at]].item())
        if at >= sequence.num_prompt:
            error = max(error, (row.max() - row[sequence.token_ids[at]]).item())
        errors.append(error)
    return errors


def _described(error: BaseException) -> str:
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}"
