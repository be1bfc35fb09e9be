"""Answers of /v1/completions."""

from collections.abc import Sequence
from typing import Any

from octavo.router.http.answer_format import AnswerFormat, Choice, Reason, finish_reason
from octavo.router.http.echo import Columns, Echo, columns
from octavo.router.http.schema import CompletionRequest
from octavo.router.http.vocabulary import Vocabulary
from octavo.router.text.text_offsets import TextOffsets
from octavo.v1.generation_pb2 import Accepted, Delta
from octavo.v1.sampling_pb2 import FINISH_REASON_LENGTH, TokenLogprob


class CompletionFormat(AnswerFormat):
    """The response format of text completions.

    Args:
        request: The body of the HTTP request.
    """

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request, logprobs=request.logprobs is not None)
        self._prompts: dict[int, dict[str, Any]] = {}
        self._echo = bool(request.echo)
        self._prompt_only = request.prompt_only
        self._echoes: dict[int, Echo] = {}
        self._keep_special = bool(request.options().get("keep_special_tokens"))
        self._offsets: dict[int, TextOffsets] = {}

    def opening(self, index: int) -> None:
        """Return nothing: a text completion's stream begins with text."""

    def accept(
        self, indices: Sequence[int], accepted: Accepted, prompt: str | None, vocabulary: Vocabulary
    ) -> list[Choice]:
        """Return choices with the prompt or its tokens, if the request asks for them."""
        report = self._prompt_report(accepted, vocabulary)
        self._prompts |= dict.fromkeys(indices, report)
        echo = Echo("", None)
        if self._echo:
            echo = Echo.of(accepted, prompt, vocabulary, logprobs=self._logprobs)
            self._echoes |= dict.fromkeys(indices, echo)
        elif not report:
            return []
        return [_choice(index, echo.text, echo.columns, None) | report for index in indices]

    def piece(
        self, index: int, delta: Delta, logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary
    ) -> Choice | None:
        """Return the choice of a chunk with text."""
        tokens = self._shown_tokens(delta)
        if self._prompt_only or not (delta.text or logprobs or any(tokens.values())):
            return None
        return _choice(index, delta.text, self._columns(index, logprobs, vocabulary), None) | tokens

    def ending(self, index: int, reason: Reason) -> Choice:
        """Return the choice of an output's last chunk."""
        return _choice(index, "", None, self._reason(reason))

    def whole(
        self,
        index: int,
        delta: Delta,
        logprobs: Sequence[TokenLogprob],
        reason: Reason,
        vocabulary: Vocabulary,
    ) -> Choice:
        """Return the choice of a whole output, after the prompt if it is to be echoed."""
        text = delta.text
        if self._prompt_only:
            delta, text, logprobs = Delta(), "", ()
        shown = self._columns(index, logprobs, vocabulary)
        if (echo := self._echoes.get(index)) is not None:
            text = echo.text + text
            if echo.columns is not None and shown is not None:
                shown = {name: echo.columns[name] + values for name, values in shown.items()}
        choice = _choice(index, text, shown, self._reason(reason))
        return choice | self._shown_tokens(delta) | self._prompts.get(index, {})

    def _reason(self, reason: Reason) -> str:
        return finish_reason(FINISH_REASON_LENGTH if self._prompt_only else reason)

    def _columns(
        self, index: int, logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary
    ) -> Columns | None:
        if not self._logprobs:
            return None
        if (offsets := self._offsets.get(index)) is None:
            echo = self._echoes.get(index)
            before = 0 if echo is None else len(echo.text)
            offsets = TextOffsets(vocabulary.pieces, before, keep_special=self._keep_special)
            self._offsets[index] = offsets
        starts = [offsets.next(one.token_id) for one in logprobs]
        return {**columns(logprobs, vocabulary), "text_offset": starts}


def _choice(index: int, text: str, logprobs: Columns | None, reason: str | None) -> Choice:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
