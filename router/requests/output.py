"""One output of a request: its tokens, its text, its end."""

from collections.abc import Sequence
from typing import TypeAlias

from octavo.router.text.detokenizer import Detokenizer, Kind, Pieces
from octavo.router.text.stop_strings import StopStrings
from octavo.v1 import generation_pb2, sampling_pb2
from octavo.v1.sampling_pb2 import FinishReason

Reason: TypeAlias = "FinishReason.ValueType"

# Enum attributes are looked up by name each time; these are used for every token.
NOT_ENDED = FinishReason.FINISH_REASON_UNSPECIFIED
STOP_STRING = FinishReason.FINISH_REASON_STOP_STRING
STOPPING_TOKEN = (FinishReason.FINISH_REASON_EOS, FinishReason.FINISH_REASON_STOP_TOKEN)


class Output:
    """Detokenizes one output until a stop string or the engine ends it.

    Tokens are worked on as they come, so that a stop string is found however
    slowly the client reads; what the client has not been sent yet is kept
    together, to go as one Delta.

    Attributes:
        index: Which of the request's outputs.
        token_ids: All tokens drawn, the one that ended it included.
        reason: Why it ended; UNSPECIFIED until then.
        score: A beam search's score; None otherwise.
        first_time: When its first token came, by the monotonic clock.
        last_time: When its last one came.
    """

    __slots__ = (
        "_delta",
        "_detokenizer",
        "_finish_sent",
        "_include",
        "_min_tokens",
        "_options",
        "_pieces",
        "_reported",
        "_stop_strings",
        "_taken",
        "_text",
        "first_time",
        "index",
        "last_time",
        "reason",
        "score",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        pieces: Pieces,
        stop: sampling_pb2.StopConditions,
        options: sampling_pb2.OutputOptions,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.reason: Reason = NOT_ENDED
        self.score: float | None = None
        self.first_time = self.last_time = 0.0
        self._pieces = pieces
        self._detokenizer = Detokenizer(pieces, keep_special=options.keep_special_tokens)
        self._stop_strings = StopStrings(stop.strings, include=stop.include_in_output)
        self._include = stop.include_in_output
        self._min_tokens = stop.min_tokens
        self._options = options
        self._text: list[str] = []  # not yet sent
        self._taken = 0  # tokens that came before the last `take`
        self._reported = 0  # tokens whose ids were sent
        self._delta = generation_pb2.Delta(index=index)  # log-probabilities not yet sent
        self._finish_sent = False

    @property
    def ended(self) -> bool:
        """Whether it takes no more tokens."""
        return self.reason != NOT_ENDED

    @property
    def finished(self) -> bool:
        """Whether its end has been taken by `finish`."""
        return self._finish_sent

    @property
    def unread(self) -> int:
        """Tokens that came since the last `take`: the client is slow if they are many."""
        return len(self.token_ids) - self._taken

    @property
    def seconds_per_token(self) -> float | None:
        """Mean seconds per token after the first; None before the second."""
        if len(self.token_ids) < 2:
            return None
        return (self.last_time - self.first_time) / (len(self.token_ids) - 1)

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[sampling_pb2.TokenLogprob],
        reason: Reason,
    ) -> None:
        """Take what the engine drew, up to the token that completes a stop string."""
        drawn = len(self.token_ids)
        plain = len(token_ids) - (reason in STOPPING_TOKEN)
        for i, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if i < plain:
                self._show(self._detokenizer.feed(token_id))
            if self.ended:
                break
        if self._options.HasField("logprobs"):
            self._delta.logprobs.extend(logprobs[: len(self.token_ids) - drawn])
        if reason and not self.ended:
            self._end(reason)

    def take(self) -> generation_pb2.Delta | None:
        """Return what came since the last call as one Delta; None if nothing did."""
        self._taken = len(self.token_ids)
        delta = self._delta
        if self._text:
            delta.text = "".join(self._text)
            self._text.clear()
        if self._options.token_ids:
            delta.token_ids.extend(self.token_ids[self._reported :])
            self._reported = len(self.token_ids)
        if not (delta.text or delta.token_ids or delta.logprobs):
            return None
        self._delta = generation_pb2.Delta(index=self.index)
        return delta

    def finish(self, prompt_tokens: int, cached_tokens: int) -> generation_pb2.Finished:
        """Return the output's end, to be sent after its last Delta."""
        self._finish_sent = True
        return generation_pb2.Finished(
            index=self.index,
            reason=self.reason,
            usage=generation_pb2.Usage(
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                output_tokens=len(self.token_ids),
            ),
            stop_string=self._stop_strings.found or "",
            stop_token_id=self.token_ids[-1] if self.reason in STOPPING_TOKEN else None,
            score=self.score,
        )

    def _show(self, text: str) -> None:
        """Show text, up to a stop string, which ends the output unless it is too early."""
        if not text:
            return
        text = self._stop_strings.feed(text, armed=len(self.token_ids) >= self._min_tokens)
        if text:
            self._text.append(text)
        if self._stop_strings.found is not None:
            self.reason = STOP_STRING

    def _end(self, reason: Reason) -> None:
        """Show what was held back, and the token that ended the output if it is wanted."""
        last = self.token_ids[-1] if reason in STOPPING_TOKEN and self._include else None
        special = last is not None and self._pieces.kind(last) == Kind.SKIPPED
        if last is not None and not special:
            self._show(self._detokenizer.feed(last))
        if not self.ended:
            self._show(self._detokenizer.flush())
        if self.ended:  # a stop string was complete in it
            return
        self._text.append(self._stop_strings.flush())
        if last is not None and special:
            self._text.append(self._pieces.special_text(last))
        self.reason = reason
