"""Detection of stop strings, which vLLM's contract leaves to the engine."""

from collections.abc import Sequence

from tokenizers import Tokenizer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StopStrings:
    """Watches the text of one output for the first of its stop strings.

    Args:
        tokenizer: The model's tokenizer.
        strings: The stop strings; none is empty.
        min_tokens: Minimum tokens before a stop string ends the output.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], min_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._kept = max(map(len, strings)) - 1
        self._min_tokens = min_tokens
        self._count = 0
        self._token_ids: list[int] = []  # those that the next token's text depends on
        self._known = 0  # of these, tokens whose text was searched
        self._tail = ""

    def find(self, token_id: int) -> str | None:
        """Add a token; return the string that it completes, the first of several."""
        self._count += 1
        self._token_ids.append(token_id)
        before, after = self._decode(self._token_ids[: self._known]), self._decode(self._token_ids)
        if len(after) <= len(before) or after.endswith(INCOMPLETE):
            return None
        del self._token_ids[: self._known]
        self._known = len(self._token_ids)
        text = self._tail + after[len(before) :]
        self._tail = text[max(len(text) - self._kept, 0) :]
        places = [(text.find(string), string) for string in self._strings if string in text]
        return min(places)[1] if places and self._count >= self._min_tokens else None

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text
