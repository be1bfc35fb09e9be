"""Control tokens: special tokens that only a chat's template may write.

If a caller's text spells one, such as `<|im_end|>`, it is encoded as ordinary tokens. To find such
spellings, the chat is rendered again with marks around them.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from octavo.common import rpc
from octavo.router.text.respelt import Respelt

Change = Callable[[str], str]
"""Returns a caller's text as the template should see it."""
PRIVATE_USE = range(0xE000, 0xF900)
"""Unicode's private use area: characters that texts hardly ever contain."""


class ControlTokens:
    """Encodes chats so that no text of a caller becomes a control token.

    Args:
        added: The tokenizer's added tokens, by id.
        backend: The tokenizer's `tokenizers.Tokenizer`; None: it has none, so texts that spell
            control tokens are rejected.
    """

    def __init__(self, added: Mapping[int, Any], backend: Any) -> None:  # noqa: ANN401 - tokenizers has no types
        self._added = {token.content: token for token in added.values() if token.content}
        self._backend = backend
        # White space tokens may be marked special, but templates and callers write them as text.
        self._control = frozenset(
            text for text, token in self._added.items() if token.special and not text.isspace()
        )
        self._lowered = sorted({text.lower() for text in self._control})
        self._beginnings = frozenset(
            text[:end]
            for text in self._lowered
            for end in range(1, len(text))
            if not text[:end].isalnum()  # a word's end could be any text's end
        )
        # A normalizer may turn other spellings into control tokens.
        self._normalized = any(self._added[text].normalized for text in self._control)
        self._respelt: Respelt | None = None

    def may_be_in(self, texts: Iterable[str]) -> bool:
        """Return whether texts may contain control tokens, or end with the beginning of one."""
        return (self._normalized and self._backend is not None) or any(
            any(text in lowered for text in self._lowered) or self._beginning(lowered)
            for lowered in map(_lower, texts)
        )

    def encode(self, text: str, texts: Sequence[str], render: Callable[[Change], str]) -> list[int]:
        """Return the tokens of a rendered chat; callers' texts never become control tokens.

        Args:
            text: The rendered chat.
            texts: The caller's texts in it.
            render: Renders the chat with changed texts of the caller.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT if the caller's spellings cannot be found.
        """
        if self._backend is None:
            raise _refused("the model's tokenizer cannot encode them as text")
        before, after = private_characters(2, [text, *texts])
        # A template may check how a text begins or ends, where a mark could change the result.
        for marks in ((before, after), (before, ""), ("", after)):
            marked = Marked(render(self._marking(*marks)), *marks)
            if marked.text == text:
                return self._encode(marked)
        raise _refused("the model's chat template changes its prompt because of them")

    def _encode(self, marked: "Marked") -> list[int]:
        if self._respelt is None:
            self._respelt = Respelt(self._backend, self._added, self._control)
        text, pieces, end = marked.text, [], 0
        callers = set()
        for match in self._matches(text):
            if match[0] in self._control:
                if marked.has(*match.span()):
                    callers.add(match[0])
                else:
                    pieces += [text[end : match.start()], self._respelt.spellings[match[0]]]
                    end = match.end()
        ids = self._respelt.encode("".join([*pieces, text[end:]]))
        if made := self._respelt.made_of_text(ids, callers):
            raise _refused(f"the model's tokenizer turns ordinary text into {made!r}")
        return self._respelt.own_ids(ids)

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """Find added tokens like tokenizers: the first match, and the longest at its position."""
        present = sorted((one for one in self._added if one in text), key=len, reverse=True)
        if not present:
            return iter(())
        return re.finditer(
            "|".join(
                rf"(?<!\w){re.escape(one)}(?!\w)"
                if self._added[one].single_word
                else re.escape(one)
                for one in present
            ),
            text,
        )

    def _marking(self, before: str, after: str) -> Change:
        """Return a function that marks control tokens in texts, and beginnings of one at their end.

        Case is ignored, as a template may change it. One of the marks may be empty.
        """

        def mark(text: str) -> str:
            lowered = _lower(text)
            starts, ends = set(), set()
            for spelling in self._lowered:
                start = lowered.find(spelling)
                while start >= 0:
                    starts.add(start)
                    ends.add(start + len(spelling))
                    start = lowered.find(spelling, start + 1)
            if beginning := self._beginning(lowered):
                starts.add(len(text) - beginning)
                ends.add(len(text))
            pieces, last = [], 0
            for place in sorted(starts | ends):
                pieces.append(text[last:place])
                pieces += [after] * (place in ends) + [before] * (place in starts)
                last = place
            return "".join([*pieces, text[last:]])

        return mark

    def _beginning(self, lowered: str) -> int:
        """Return the length of a text's longest end that begins a control token."""
        longest = max(map(len, self._lowered), default=0)
        lengths = range(min(longest, len(lowered)), 0, -1)
        return next((n for n in lengths if lowered[-n:] in self._beginnings), 0)


class Marked:
    """A text rendered with marks, and the marks' places.

    Attributes:
        text: The text without the marks.
    """

    def __init__(self, rendered: str, before: str, after: str) -> None:
        self._starts: set[int] | None = set() if before else None
        self._ends: set[int] | None = set() if after else None
        places = {before: self._starts, after: self._ends}
        places |= {_in_json(mark): positions for mark, positions in places.items() if mark}
        places.pop("", None)
        self._all: list[int] = []
        pieces, last, length = [], 0, 0
        for match in re.finditer("|".join(map(re.escape, places)), rendered):
            pieces.append(rendered[last : match.start()])
            length += len(pieces[-1])
            last = match.end()
            positions = places[match[0]]
            assert positions is not None
            positions.add(length)
            self._all.append(length)
        self.text = "".join([*pieces, rendered[last:]])

    def has(self, start: int, end: int) -> bool:
        """Return whether a span was marked, or contains marks because a template joined texts."""
        following = bisect_right(self._all, start)
        if following < len(self._all) and self._all[following] < end:
            return True
        return (self._starts is None or start in self._starts) and (
            self._ends is None or end in self._ends
        )


def private_characters(count: int, texts: Iterable[str]) -> list[str]:
    """Return characters that are not in `texts`, neither plain nor JSON-escaped.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT if the texts contain all of them.
    """
    texts = list(texts)
    used = set().union(*texts)
    free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
    chosen = []
    for one in free:
        if not any(_in_json(one) in text for text in texts):
            chosen.append(one)
        if len(chosen) == count:
            return chosen
    raise _refused("they have all characters of Unicode's private use area")


def _in_json(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _lower(text: str) -> str:
    """Convert a text to lower case without making any character longer."""
    return text.replace("\u0130", "i").lower()


def _refused(why: str) -> rpc.RpcError:
    return rpc.invalid(
        "chat.messages",
        f"chat.messages or tools spell control tokens, but {why}; leave them out",
    )
