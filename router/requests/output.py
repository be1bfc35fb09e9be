"""One output of a request: tokens, text and end."""

import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from octavo.router.requests.logprobs import ELSEWHERE, HeldLogprobs
from octavo.router.requests.parsers.formats import OutputPlan
from octavo.router.requests.parsers.parser import Piece, PieceKind
from octavo.router.requests.spelled_markers import SpelledMarkers, mended
from octavo.router.text.detokenizer import Detokenizer, Pieces, TokenKind
from octavo.router.text.stop_strings import StopStrings
from octavo.v1 import generation_pb2, sampling_pb2
from octavo.v1.sampling_pb2 import FinishReason

Reason: TypeAlias = "FinishReason.ValueType"

# Bound to module constants: enum lookups by name are slow, and these are used per token.
NOT_ENDED = FinishReason.FINISH_REASON_UNSPECIFIED
STOP_STRING = FinishReason.FINISH_REASON_STOP_STRING
TOOL_CALLS = FinishReason.FINISH_REASON_TOOL_CALLS
STOPPING_TOKEN = (FinishReason.FINISH_REASON_EOS, FinishReason.FINISH_REASON_STOP_TOKEN)

COMPLETE = (FinishReason.FINISH_REASON_EOS, TOOL_CALLS)
"""Finish reasons of outputs that were not truncated."""

CALL_ID_LENGTH = 9
CALL_ID_LETTERS = string.ascii_letters + string.digits
"""Length and letters of call ids: Mistral's chat templates require nine letters and digits."""


class Output:
    """Parses and detokenizes one output until a stop string or the engine ends it.

    Tokens are processed on arrival, so that stop strings are found even if the client reads slowly;
    unsent text is collected for one Delta.

    Attributes:
        index: Index of the output in its request.
        token_ids: All sampled tokens, including the one that ended the output.
        reason: Finish reason; UNSPECIFIED before the end.
        score: A beam search's score; None otherwise.
        drafted_tokens: Number of drafted tokens.
        accepted_tokens: Number of accepted drafted tokens.
        first_time: Monotonic time of the first token's arrival.
        last_time: Monotonic time of the last token's arrival.
    """

    __slots__ = (
        "_arguments",
        "_calls",
        "_checked_text",
        "_checks",
        "_content",
        "_delta",
        "_detokenizer",
        "_finish_sent",
        "_include",
        "_logprobs",
        "_markers",
        "_min_tokens",
        "_parser",
        "_pieces",
        "_reasoning",
        "_reasoning_tokens",
        "_reported",
        "_spelled",
        "_stop_strings",
        "_stopped",
        "_taken",
        "_text",
        "_verbatim",
        "_visible",
        "_wants_logprobs",
        "_wants_token_ids",
        "accepted_tokens",
        "drafted_tokens",
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
        plan: OutputPlan | None = None,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.reason: Reason = NOT_ENDED
        self.score: float | None = None
        self.first_time = self.last_time = 0.0
        self.drafted_tokens = self.accepted_tokens = 0
        self._pieces = pieces
        self._parser = None if plan is None else plan.parser()
        self._visible: frozenset[int] = frozenset()
        self._markers: Mapping[int, str] = {}  # markers only as single tokens
        if plan is not None and self._parser is not None:
            self._visible = plan.visible(self._parser)
            self._markers = plan.markers(self._parser)
        self._detokenizer = Detokenizer(
            pieces, keep_special=options.keep_special_tokens, visible=self._visible
        )
        self._stop_strings = StopStrings(stop.strings, include=stop.include_in_output)
        self._spelled = SpelledMarkers(self._markers.values()) if self._markers else None
        self._include = stop.include_in_output
        self._min_tokens = stop.min_tokens
        self._checks = None if plan is None else plan.checks
        self._checked_text: list[str] = []  # content to be checked at the end
        self._arguments: dict[int, tuple[str, list[str]]] = {}  # schema and text, by call to check
        self._verbatim = self._parser is None and not stop.strings and self._checks is None
        self._wants_logprobs = options.HasField("logprobs")
        self._wants_token_ids = options.token_ids
        hides = options.HasField("logprobs") and stop.strings and not stop.include_in_output
        self._logprobs = HeldLogprobs() if hides else None
        self._content = 0  # characters of content, stop strings included
        self._text: list[str] = []  # unsent
        self._reasoning: list[str] = []  # unsent
        self._calls = 0  # number of tool calls so far
        self._stopped = False  # whether a token ended the output
        self._taken = 0  # number of tokens at the last `take`
        self._reported = 0  # number of token ids sent
        self._reasoning_tokens = 0
        self._delta = generation_pb2.Delta(index=index)  # with unsent log-probabilities
        self._finish_sent = False

    @property
    def ended(self) -> bool:
        """Whether the output accepts no more tokens."""
        return self.reason != NOT_ENDED

    @property
    def finished(self) -> bool:
        """Whether `finish` has returned the output's end."""
        return self._finish_sent

    @property
    def unread(self) -> int:
        """Tokens since the last `take`; many if the client reads slowly."""
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
        """Add tokens from the engine, up to the one that completes a stop string."""
        if self._verbatim and not reason and not self._wants_logprobs:
            self._push_verbatim(token_ids)
            return
        sampled = len(self.token_ids)
        plain = len(token_ids) - (reason in STOPPING_TOKEN)
        for i, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            before = self._content
            if i < plain:
                self._take_text(token_id)
            if self._logprobs is not None and i < len(logprobs):
                elsewhere = self._parser is not None and self._content == before
                self._logprobs.add(ELSEWHERE if elsewhere else before, logprobs[i])
            if self.ended:
                break
        if self._logprobs is not None:
            self._show_logprobs(self._logprobs)
        elif self._wants_logprobs:
            self._delta.logprobs.extend(logprobs[: len(self.token_ids) - sampled])
        if reason and not self.ended:
            self._end(reason)

    def take(self) -> generation_pb2.Delta | None:
        """Return a Delta of everything since the last call; None if there is nothing."""
        self._taken = len(self.token_ids)
        delta = self._delta
        if self._text:
            delta.text = "".join(self._text)
            self._text.clear()
        if self._reasoning:
            delta.reasoning = "".join(self._reasoning)
            self._reasoning.clear()
        if self._wants_token_ids:
            delta.token_ids.extend(self.token_ids[self._reported :])
            self._reported = len(self.token_ids)
        # A Delta with only an index is empty. Check the text first, as nearly all have some.
        if not delta.text and not delta.ListFields()[1 if delta.index else 0 :]:
            return None
        self._delta = generation_pb2.Delta(index=self.index)
        return delta

    def finish(self, prompt_tokens: int, cached_tokens: int) -> generation_pb2.Finished:
        """Return the Finished message, to be sent after the last Delta."""
        self._finish_sent = True
        return generation_pb2.Finished(
            index=self.index,
            reason=self.reason,
            usage=generation_pb2.Usage(
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                output_tokens=len(self.token_ids),
                reasoning_tokens=self._reasoning_tokens,
                drafted_tokens=self.drafted_tokens,
                accepted_tokens=self.accepted_tokens,
            ),
            stop_string=self._stop_strings.found or "",
            stop_token_id=self.token_ids[-1] if self._stopped else None,
            score=self.score,
        )

    def unchecked(self) -> dict[str, tuple[str, str]]:
        """Return the parts of a complete output to check; see `SchemaChecker.errors`."""
        if self._checks is None or self.reason not in COMPLETE:
            return {}
        parts = {
            f"tool_calls[{i}].arguments": (schema, "".join(pieces))
            for i, (schema, pieces) in self._arguments.items()
        }
        if self._checks.checked_content is not None and not self._calls:
            parts["content"] = self._checks.checked_content, "".join(self._checked_text)
        return parts

    def _push_verbatim(self, token_ids: Sequence[int]) -> None:
        """Add tokens whose text is neither parsed nor searched for stop strings."""
        self.token_ids.extend(token_ids)
        for token_id in token_ids:
            if text := self._detokenizer.feed(token_id):
                self._text.append(text)

    def _take_text(self, token_id: int) -> None:
        """Process a token's text; count the token if it is within reasoning."""
        reasoned = self._parser is not None and self._parser.reasons
        text = self._detokenizer.feed(token_id)
        if self._spelled is not None:
            text = self._told_apart(self._spelled, token_id, text)
        self._show(text)
        if reasoned and self._parser is not None and self._parser.reasons:
            self._reasoning_tokens += 1

    def _told_apart(self, spelled: SpelledMarkers, token_id: int, text: str) -> str:
        """Return a token's text, altered for the parser if it only looks like a marker."""
        marker = self._markers.get(token_id, "")
        marker = marker if text.endswith(marker) else ""
        if not marker and self._parser is not None and self._parser.calls:
            return spelled.flush() + text
        return spelled.feed(text, marker)

    def _show(self, text: str) -> None:
        """Process text; a stop string ends the output if it has its minimum of tokens."""
        if not text:
            return
        if self._parser is None:
            self._show_content(text)
        else:
            self._show_pieces(self._parser.feed(text))

    def _show_pieces(self, pieces: Iterable[Piece]) -> None:
        for kind, piece in pieces:
            text = piece if self._spelled is None else mended(piece)
            if kind == PieceKind.CONTENT:
                self._show_content(text)
                if self.ended:
                    return
            elif kind == PieceKind.REASONING:
                self._reasoning.append(text)
            elif kind == PieceKind.CALL:
                self._begin_call(text)
            else:
                self._add_arguments(text)

    def _show_content(self, text: str) -> None:
        self._content += len(text)
        text = self._stop_strings.feed(text, armed=len(self.token_ids) >= self._min_tokens)
        if text:
            self._add_content(text)
        if self._stop_strings.found is not None:
            self.reason = STOP_STRING

    def _add_content(self, text: str) -> None:
        self._text.append(text)
        if self._checks is not None and self._checks.checked_content is not None:
            self._checked_text.append(text)

    def _show_logprobs(self, held: HeldLogprobs) -> None:
        """Release log-probabilities of tokens that begin within the released content."""
        self._delta.logprobs.extend(held.before(self._content - self._stop_strings.hidden))

    def _begin_call(self, name: str) -> None:
        call_id = "".join(secrets.choice(CALL_ID_LETTERS) for _ in range(CALL_ID_LENGTH))
        self._delta.tool_calls.add(index=self._calls, id=call_id, name=name)
        if self._checks is not None and name in self._checks.checked_arguments:
            self._arguments[self._calls] = self._checks.checked_arguments[name], []
        self._calls += 1

    def _add_arguments(self, text: str) -> None:
        calls = self._delta.tool_calls
        call = calls[-1] if calls else calls.add(index=self._calls - 1)
        call.arguments += text
        if call.index in self._arguments:
            self._arguments[call.index][1].append(text)

    def _end(self, reason: Reason) -> None:
        """Release all held text, and the stop token if the client wants it."""
        self._stopped = reason in STOPPING_TOKEN
        last = self.token_ids[-1] if self._stopped and self._include else None
        special = last is not None and self._pieces.kind(last) == TokenKind.SKIPPED
        rest = "" if self._spelled is None else self._spelled.flush()
        if last is not None and not special:
            rest += self._detokenizer.feed(last)
        self._show(rest + self._detokenizer.flush())
        if not self.ended and self._parser is not None:
            self._show_pieces(self._parser.flush())
        if self.ended:  # the held text completed a stop string
            self._stopped = False
            if self._logprobs is not None:
                self._show_logprobs(self._logprobs)
            return
        self._add_content(self._stop_strings.flush())
        if self._logprobs is not None:
            self._delta.logprobs.extend(self._logprobs.rest())
        if last is not None and special and last not in self._visible:
            self._text.append(self._pieces.special_text(last))
        self.reason = TOOL_CALLS if self._calls and self._stopped else reason
