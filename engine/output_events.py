"""The events of a step's tokens."""

from collections import defaultdict

import numpy as np

from octavo.engine.events import OutputEvent, StepOutput
from octavo.engine.scheduling.batch import Samples
from octavo.engine.scheduling.beam_search import BeamState
from octavo.engine.scheduling.sequence import GroupEvent, Sequence, SequenceGroup, TokenLogprob


def add_outputs(events: defaultdict[int, StepOutput], samples: Samples) -> None:
    """Add a step's tokens, and the beam searches that it ends, to their sessions' events.

    Tokens without separate events are in columns.
    """
    single = samples.numbers == 0  # whether a token has a separate event
    single[samples.ends] = True
    single[list(samples.logprobs)] = True
    # A comprehension for speed, as nearly all tokens need no separate event.
    columns = enumerate(zip(samples.groups, samples.sequences, strict=True))
    rare = [i for i, (g, s) in columns if not g.decoding or g.prompt_logprobs or s.drafted_tokens]
    for i in rare:
        group, sequence = samples.groups[i], samples.sequences[i]
        if not group.decoding:
            group.decoding = True
            group.record(GroupEvent.DECODE)
        single[i] |= _ends_draft(samples, i) or bool(_scores_to_report(group, sequence))
    token_ids = np.array(samples.token_ids, np.int64)
    for session in set(samples.sessions[~single].tolist()):
        chosen = ~single & (samples.sessions == session)
        events[session].numbers += samples.numbers[chosen].tolist()
        events[session].token_ids += token_ids[chosen].tolist()
    ends = set(samples.ends)
    for i in np.flatnonzero(single).tolist():
        outputs = events[samples.groups[i].request.session].outputs
        outputs.append(_output_event(samples, i, ends=i in ends))
    for group in samples.searches:
        assert group.beam is not None
        events[group.request.session].outputs += _search_events(group, group.beam)


def _output_event(samples: Samples, i: int, *, ends: bool) -> OutputEvent:
    """Return the event of one token, with its log-probabilities, draft counts and end."""
    group, sequence = samples.groups[i], samples.sequences[i]
    counts = sequence.take_draft_counts() if _ends_draft(samples, i) else (0, 0)
    return OutputEvent(
        group.request.request_id,
        sequence.index,
        [samples.token_ids[i]],
        samples.logprobs.get(i),
        _scores_to_report(group, sequence),
        sequence.finish_reason if ends else None,
        None,
        *counts,
        number=int(samples.numbers[i]),
    )


def _ends_draft(samples: Samples, i: int) -> bool:
    """Return whether a token is the last of a sequence with drafted tokens in the step."""
    sequence, following = samples.sequences[i], samples.sequences[i + 1 : i + 2]
    return sequence.drafted_tokens > 0 and (not following or following[0] is not sequence)


def _search_events(group: SequenceGroup, search: BeamState) -> list[OutputEvent]:
    """Return an event for each output of a beam search that ended, best first.

    A constraint may leave fewer outputs than the search's width; then they are repeated.
    """
    request, width, count = group.request, search.params.width, len(search.hypotheses)
    hypotheses = [search.hypotheses[rank * count // width] for rank in range(width)]
    return [
        OutputEvent(
            request.request_id,
            rank,
            hypothesis.token_ids,
            None,
            [],
            request.finish_reason(hypothesis.token_ids[-1], len(hypothesis.token_ids)),
            hypothesis.score,
        )
        for rank, hypothesis in enumerate(hypotheses)
    ]


def _scores_to_report(group: SequenceGroup, sequence: Sequence) -> list[TokenLogprob]:
    """Return the prompt's log-probabilities for the first output's first token, else none."""
    first = group.prompt_logprobs and sequence.num_known_output == 1 and sequence.index == 0
    return group.prompt_logprobs if first else []
