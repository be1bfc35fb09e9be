"""The events of a step's tokens."""

from collections import defaultdict
from itertools import zip_longest

import numpy as np

from octavo.engine.events import Event, NumberedTokens, OutputEvent
from octavo.engine.scheduling.batch import SampledToken, SamplerOutput
from octavo.engine.scheduling.beam_search import BeamState
from octavo.engine.scheduling.request import FinishReason
from octavo.engine.scheduling.sequence import GroupEvent, Sequence, SequenceGroup, TokenLogprob
from octavo.engine.scheduling.steady import DecodedTokens

_Columns = defaultdict[int, tuple[list[int], list[int]]]
"""Numbers of outputs, and their tokens, by session."""


def output_events(output: SamplerOutput) -> list[Event]:
    """Return the events of a step's tokens, and of the beam searches that it ends."""
    columns: _Columns = defaultdict(lambda: ([], []))
    events = _steady_events(output.steady, columns)
    events += _ruled_events(output.tokens, columns)
    for group in output.searches:
        assert group.beam is not None
        events += _search_events(group, group.beam)
    # Columns are first: what ends an output follows its tokens.
    return [NumberedTokens(session, *each) for session, each in columns.items()] + events


def _steady_events(tokens: DecodedTokens, columns: _Columns) -> list[Event]:
    """Put tokens of steady sequences into the columns of their sessions.

    Returns:
        Events of the tokens that end an output, and of outputs without a number.
    """
    decodes = tokens.decodes
    in_columns = decodes.numbers != 0
    in_columns[tokens.ends] = False
    token_ids = np.array(tokens.token_ids, np.int64)
    for session in set(decodes.sessions.tolist()):
        rows = np.flatnonzero(in_columns & (decodes.sessions == session))
        if len(rows):
            numbers, found = columns[session]
            numbers += decodes.numbers[rows].tolist()
            found += token_ids[rows].tolist()
    events: list[Event] = []
    for i in np.flatnonzero(~in_columns):
        sequence = decodes.sequences[i]
        sampled = SampledToken(decodes.groups[i], sequence, tokens.token_ids[i])
        events.append(_output_event(sampled, [], sequence.finish_reason, (0, 0)))
    return events


def _ruled_events(tokens: list[SampledToken], columns: _Columns) -> list[Event]:
    """Do the same for the other tokens, which may come with log-probabilities or counts."""
    events: list[Event] = []
    for sampled, following in zip_longest(tokens, tokens[1:]):
        group, sequence, token_id, logprob = sampled
        request, scores = group.request, _scores_to_report(group, sequence)
        reason, counts = None, (0, 0)
        if following is None or following.sequence is not sequence:
            reason = sequence.finish_reason
            if sequence.drafted_tokens:
                counts = sequence.take_draft_counts()
        more = logprob is not None or scores or reason is not None or counts[0]
        if request.first_number and not more:
            numbers, token_ids = columns[request.session]
            numbers.append(request.first_number + sequence.index)
            token_ids.append(token_id)
        else:
            events.append(_output_event(sampled, scores, reason, counts))
        if not group.decoding:
            group.decoding = True
            group.record(GroupEvent.DECODE)
    return events


def _search_events(group: SequenceGroup, search: BeamState) -> list[Event]:
    """Return an event for each output of a beam search that ended, best first.

    A constraint may leave fewer than the search's width; then they are repeated.
    """
    request, width, count = group.request, search.params.width, len(search.hypotheses)
    hypotheses = [search.hypotheses[rank * count // width] for rank in range(width)]
    return [
        OutputEvent(
            request.session,
            request.request_id,
            rank,
            found.token_ids,
            None,
            [],
            request.finish_reason(found.token_ids[-1], len(found.token_ids)),
            found.score,
        )
        for rank, found in enumerate(hypotheses)
    ]


def _scores_to_report(group: SequenceGroup, sequence: Sequence) -> list[TokenLogprob]:
    """Return the prompt's log-probabilities with the first token of the first output, else none."""
    first = group.prompt_logprobs and sequence.num_known_output == 1 and sequence.index == 0
    return group.prompt_logprobs if first else []


def _output_event(
    sampled: SampledToken,
    scores: list[TokenLogprob],
    reason: FinishReason | None,
    draft_counts: tuple[int, int],
) -> OutputEvent:
    """Return the event of a token of which there may be more to say."""
    group, sequence, token_id, logprob = sampled
    request = group.request
    return OutputEvent(
        request.session,
        request.request_id,
        sequence.index,
        [token_id],
        logprob,
        scores,
        reason,
        None,
        *draft_counts,
        number=request.first_number + sequence.index if request.first_number else 0,
    )
