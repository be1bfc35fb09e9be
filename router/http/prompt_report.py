"""What vLLM's API reports of a prompt: its tokens, and their log-probabilities."""

from typing import Any

from octavo.router.http.answer_format import finite
from octavo.router.http.vocabulary import Vocabulary
from octavo.v1.generation_pb2 import Accepted
from octavo.v1.sampling_pb2 import TokenLogprob


def prompt_report(
    accepted: Accepted, vocabulary: Vocabulary, *, token_ids: bool, logprobs: bool
) -> dict[str, Any]:
    """Return the requested members of a response or a choice.

    Args:
        accepted: The engine's answer to the request.
        vocabulary: The model's vocabulary.
        token_ids: Whether to report the prompt's token ids.
        logprobs: Whether to report their log-probabilities.
    """
    report: dict[str, Any] = {}
    if token_ids:
        report["prompt_token_ids"] = list(accepted.prompt_token_ids)
    if logprobs:
        # The first token has no log-probability: nothing precedes it.
        shown = [_logprobs(one, vocabulary) for one in accepted.prompt_logprobs]
        report["prompt_logprobs"] = [None, *shown]
    return report


def _logprobs(one: TokenLogprob, vocabulary: Vocabulary) -> dict[str, dict[str, Any]]:
    """Return a token and the most likely ones, by their ids; others have no rank."""
    ranks = {top.token_id: rank for rank, top in enumerate(one.top, 1)}
    logprobs = {one.token_id: one.logprob, **{top.token_id: top.logprob for top in one.top}}
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": vocabulary.token(token_id).text,
        }
        for token_id, logprob in logprobs.items()
    }
