"""Serve one tiny model under memory pressure and compare it with eager transformers."""

import random
from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import inf
from pathlib import Path

import torch
from safetensors.torch import save_file

from octavo.common.models.errors import ModelError
from octavo.engine.scheduling.request import BeamSearch, Resumption
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup
from octavo.engine.scheduling.swap_or_recompute import PreemptionPolicy
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.engine.startup.capacity import StartupError
from tests.architectures.eager import CLOSE, TOLERANCE, Eager, is_drawn
from tests.architectures.entries import Entry
from tests.architectures.tiny import (
    FIRST_TOKEN,
    VOCABULARY,
    make_model,
    tiny_config,
)
from tests.engine.stepper import Stepper

BLOCK_SIZE = 8
CROWDINGS = (1.6, 1.4, 1.3, 1.15, 1.0, 2.0)
"""Numbers of blocks to try, as multiples of the largest request's, until requests are both swapped
and recomputed."""
BATCHED_TOKENS = 24
"""Tokens per step: most prompts are prefilled in several chunks, beside others' decodes."""
LENGTHS = (5, 60, 33, 17, 48)
OUTPUT_TOKENS = 18
SHARED_TOKENS = 40
"""Tokens of the longest prompt that is a prefix of another."""
SEEDED_LENGTH, SEEDED_OUTPUTS, SEED = 35, 2, 7
BEAM_LENGTH, BEAM_WIDTH, BEAM_TOKENS = 19, 3, 10
STEPS_BEFORE = 3
"""Steps of requests with several outputs before other requests preempt them."""
CUTS = (11, 4)
"""Tokens before a request's outputs move to another engine."""


class Outcome(StrEnum):
    """The outcome of an entry."""

    RIGHT = "right"
    REFUSED = "refused"  # at start, with a one-line message
    WRONG = "wrong"  # accepted, but tokens or log-probabilities differ from eager's
    CRASHED = "crashed"  # at start, with any other exception
    FAILED = "failed"  # accepted, but a step raised
    NO_CONFIG = "no config"  # the tiny model could not be created: a fault of this harness


@dataclass(slots=True)
class Finding:
    """An entry's outcome.

    Attributes:
        name: Name of the entry.
        outcome: Its outcome.
        detail: The refusal, the exception, or the first difference.
        error: The largest difference of a log-probability.
        tokens: Number of compared tokens.
        preemptions: Numbers of groups swapped out and dropped.
        seconds: Duration.
    """

    name: str
    outcome: Outcome
    detail: str = ""
    error: float | None = None
    tokens: int = 0
    preemptions: tuple[int, int] = (0, 0)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """Return the finding for JSON."""
        return asdict(self)


def examine(entry: Entry, directory: Path, *, several: bool = True) -> Finding:
    """Create the entry's model in a directory, serve it and compare.

    Args:
        entry: The entry to examine.
        directory: Directory for its model.
        several: Also serve parallel outputs, beams, and outputs that another engine began.

    Returns:
        Its finding, without the duration.
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
    except Exception as error:  # noqa: BLE001 - the sweep looks for these
        return Finding(entry.name, Outcome.CRASHED, _described(error))
    most = engine.parts.limits.max_model_len
    if most < max(LENGTHS) + OUTPUT_TOKENS:
        detail = f"it takes no request of more than {most} tokens"
        return Finding(entry.name, Outcome.REFUSED, detail)
    try:
        crowded, groups = serve_crowded(directory, entry.max_model_len, engine, several=several)
        moved = resume(list(groups)[:4:3], engine) if several else []
        groups |= dict.fromkeys([*serve_with_common_beginning(engine), *moved], engine)
    except Exception as error:  # noqa: BLE001 - the sweep looks for these
        return Finding(entry.name, Outcome.FAILED, _described(error.__cause__ or error))
    return compare(entry.name, directory, groups, preemptions(crowded))


def save(entry: Entry, directory: Path) -> None:
    """Write the entry's tiny model, or only its config if it has no model."""
    config = tiny_config(entry.model_type, entry.overrides)
    if not entry.has_model:
        config.save_pretrained(directory)
        save_file({}, directory / "model.safetensors", {"format": "pt"})
        return
    model = make_model(config)
    model.save_pretrained(directory)
    config.save_pretrained(directory)  # of several models; the model's own config is for one
    eager = Eager(directory).logprobs(range(FIRST_TOKEN, FIRST_TOKEN + max(LENGTHS)))
    assert eager.isfinite().all(), "the tiny model's own outputs are not finite"


def start(directory: Path, max_model_len: int | None = None, num_blocks: int = 512) -> Stepper:
    """Start an engine with a directory's model, as an operator would."""
    return Stepper(build(_settings(directory, max_model_len, num_blocks)))


def _settings(directory: Path, max_model_len: int | None, num_blocks: int) -> EngineSettings:
    return EngineSettings(
        model=str(directory),
        device="cpu",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        swap_space=0.02,
        max_num_seqs=len(LENGTHS) + SEEDED_OUTPUTS + BEAM_WIDTH,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_model_len=max_model_len,
    )


def serve_crowded(
    directory: Path, max_model_len: int | None, ample: Stepper, *, several: bool
) -> tuple[Stepper, dict[SequenceGroup, Stepper]]:
    """Serve with too few blocks for all; return the engine, and each group with its engine.

    States do not grow, so a model with states alone is never preempted: it waits for blocks.

    Raises:
        StepError: A step failed.
        NothingPreemptedError: No number of blocks led to preemption.
    """
    (budget,) = ample.parts.limits.budgets
    grows = not all(group.state_blocks for group in budget.groups)
    requests = [(max(LENGTHS), OUTPUT_TOKENS, 1)]
    if several:
        requests.append((SEEDED_LENGTH, OUTPUT_TOKENS, SEEDED_OUTPUTS))
        requests.append((BEAM_LENGTH, BEAM_TOKENS, BEAM_WIDTH))
    least = max(budget.needed(*request) for request in requests)
    for crowding in CROWDINGS:
        engine = start(directory, max_model_len, int(crowding * least))
        try:
            return engine, serve(engine, must_preempt=grows, several=several)
        except NothingPreemptedError:
            if crowding == CROWDINGS[-1]:
                raise
    raise AssertionError


class NothingPreemptedError(Exception):
    """There were enough blocks for all groups."""


def serve(
    engine: Stepper, *, must_preempt: bool = True, several: bool = False
) -> dict[SequenceGroup, Stepper]:
    """Serve prompts together, once for each way to preempt.

    Args:
        engine: The engine.
        must_preempt: Whether the engine must have too few blocks for all.
        several: Also serve a request with parallel outputs and one with beams. The second time,
            another engine has begun the former.

    Returns:
        The groups, each with its engine.

    Raises:
        StepError: A step failed.
        NothingPreemptedError: With `must_preempt`, one kind of preemption did not happen.
    """
    draw = random.Random(1)
    prompts = [_tokens(draw, length) for length in LENGTHS]
    seeded, searched = _tokens(draw, SEEDED_LENGTH), _tokens(draw, BEAM_LENGTH)
    groups: list[SequenceGroup] = []
    for mode in ("swap", "recompute"):
        engine.scheduler.policy = PreemptionPolicy(mode)
        engine.cache.forget_contents()
        before, begun = preemptions(engine), [g for g in groups if g.request.sampling.n > 1]
        if several:
            groups += resume(begun, engine) or [submit_seeded(engine, seeded)]
            groups.append(engine.submit(searched, BEAM_TOKENS, beam=BeamSearch(BEAM_WIDTH)))
            for _ in range(STEPS_BEFORE):
                engine.step()
        for i, prompt in enumerate(prompts):
            groups.append(submit_greedy(engine, prompt, scored=(None, 0)[i % 2], priority=1))
        engine.run()
        after = preemptions(engine)
        if must_preempt and after[mode == "recompute"] == before[mode == "recompute"]:
            raise NothingPreemptedError(f"no {mode} happened")
    return dict.fromkeys(groups, engine)


def serve_with_common_beginning(engine: Stepper) -> list[SequenceGroup]:
    """Serve three prompts with a common prefix, one after another.

    Raises:
        StepError: A step failed.
        AssertionError: The third prompt's prefix was computed again.
    """
    draw, groups = random.Random(2), []
    longest = _tokens(draw, max(LENGTHS))
    # The state at the end of a shared prefix is cached when the prefix appears a second time.
    tails = [_tokens(draw, len(longest) - SHARED_TOKENS) for _ in range(2)]
    for prompt in (longest, *(longest[:SHARED_TOKENS] + tail for tail in tails)):
        groups.append(submit_greedy(engine, prompt))
        engine.run()
    assert groups[-1].cached_tokens >= SHARED_TOKENS - BLOCK_SIZE, "no prefix was reused"
    return groups


def resume(groups: Tokens[SequenceGroup], engine: Stepper) -> list[SequenceGroup]:
    """Submit other groups' requests with the first tokens of their outputs.

    Returns:
        The new groups.
    """
    moved = []
    for group in groups:
        begun = {
            s.index: Resumption(tuple(s.token_ids[s.num_prompt :][: CUTS[s.index]]))
            for s in group.sequences
        }
        submit = submit_seeded if len(begun) > 1 else submit_greedy
        moved.append(submit(engine, group.request.prompt, begun))
    return moved


Begun = Mapping[int, Resumption]


def submit_greedy(
    engine: Stepper,
    prompt: Tokens[int],
    begun: Begun | None = None,
    *,
    scored: int | None = None,
    priority: int = 0,
) -> SequenceGroup:
    """Submit a greedy request, perhaps with prompt log-probabilities."""
    kind = {"logprobs": 0, "prompt_logprobs": scored, "priority": priority}
    return engine.submit(prompt, OUTPUT_TOKENS, resume=begun, **kind)


def submit_seeded(
    engine: Stepper, prompt: Tokens[int], begun: Begun | None = None
) -> SequenceGroup:
    """Submit a request for several seeded outputs."""
    kind = {"temperature": 1.0, "seed": SEED, "n": SEEDED_OUTPUTS}
    return engine.submit(prompt, OUTPUT_TOKENS, logprobs=0, resume=begun, **kind)


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]


def preemptions(engine: Stepper) -> tuple[int, int]:
    """Return the numbers of groups swapped out and dropped so far."""
    counters = engine.scheduler.counters
    return counters["preemptions_swap"], counters["preemptions_recompute"]


def compare(
    name: str,
    directory: Path,
    groups: Mapping[SequenceGroup, Stepper],
    preempted: tuple[int, int],
) -> Finding:
    """Compare every token and beam with eager transformers, one whole forward per sequence.

    The forward gets the served tokens, so a token is right if it is the most likely one after the
    preceding tokens, or the one that the seed samples.

    Two experts may be equally good for a token, up to rounding. So sequences that differ in float32
    may agree with float64.
    """
    eager, errors = Eager(directory), list[float]()
    for group, engine in groups.items():
        found = _group_errors(group, engine, eager)
        if not max(found) <= TOLERANCE:
            exact = Eager(directory, torch.float64)
            found = min(found, _group_errors(group, engine, exact), key=max)
        errors += found
    wrong = sum(not error <= TOLERANCE for error in errors)
    return Finding(
        name,
        Outcome.WRONG if wrong else Outcome.RIGHT,
        f"{wrong} of {len(errors)} tokens and beams are not eager's" if wrong else "",
        max(errors),
        len(errors),
        preempted,
    )


def _group_errors(group: SequenceGroup, engine: Stepper, eager: Eager) -> list[float]:
    if group.beam is not None:
        return _beam_errors(group, eager)
    return [e for sequence in group.sequences for e in _errors(group, sequence, engine, eager)]


def _errors(group: SequenceGroup, sequence: Sequence, engine: Stepper, eager: Eager) -> list[float]:
    """Return the difference between each reported token and eager.

    It is the difference of its log-probability, or, if it was sampled, from that of the most likely
    token; infinity if the seed samples another token.
    """
    resumed = group.request.resume.get(sequence.index, Resumption(()))
    first = sequence.num_prompt + len(resumed.token_ids)
    told = dict(enumerate(group.prompt_logprobs, 1))
    drawn = [token.logprob for token in engine.sampled if token.sequence is sequence]
    told |= dict(enumerate(drawn, first))
    assert first + len(drawn) == sequence.num_tokens == sequence.num_prompt + OUTPUT_TOKENS
    assert len(told) in {len(drawn), sequence.num_tokens - 1}
    logprobs = eager.logprobs(sequence.token_ids)
    params, errors = group.request.sampling, []
    for at, found in told.items():
        assert found is not None
        row, token = logprobs[at - 1], sequence.token_ids[at]
        error = abs(found.logprob - row[token].item())
        if at >= first and params.greedy:
            error = max(error, (row.max() - row[token]).item())
        elif at >= first:
            position = at - sequence.num_prompt
            drew = is_drawn(token, row, params.seed, sequence.index, position)
            error = error if drew else inf
        errors.append(error)
    return errors


def _beam_errors(group: SequenceGroup, eager: Eager) -> list[float]:
    """Return the differences of each beam's score from eager's score of its tokens, and from
    eager's search unless rounding decided it."""
    assert group.beam is not None
    prompt, found = list(group.request.prompt), group.beam.hypotheses
    errors, search = [], eager.search(prompt, BEAM_WIDTH, BEAM_TOKENS)
    for hypothesis, score in zip(found, search.scores, strict=True):
        tokens = hypothesis.token_ids
        assert len(tokens) == BEAM_TOKENS
        rows = eager.logprobs(prompt + tokens)[len(prompt) - 1 :]
        own = sum(row[token].item() for row, token in zip(rows, tokens, strict=True))
        errors.append(abs(hypothesis.score - own / len(tokens)))
        if search.decided > CLOSE:
            errors.append(abs(hypothesis.score - score / len(tokens)))
    return errors


def _described(error: BaseException) -> str:
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}"
