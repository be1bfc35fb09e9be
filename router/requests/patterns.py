"""Reduce a JSON Schema's regular expression to what a grammar can enforce.

Grammars use the expressions of Rust's `regex` crate without assertions, except `^` and `$` at the
ends. Without its assertions, an expression matches the same texts and more.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_PATTERN = 4_096
"""Maximum characters of an expression to parse; longer ones are not enforced."""
_ESCAPE = (
    r"\\(?:[dDwWsSnrtf]|[-.^$*+?()\[\]{}|/\\_~@\#%&=:;,!\"'`\ ]|[pP]\{[A-Z][a-z]?\}"
    r"|x[0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
)
_TOKEN = re.compile(
    rf"""(?P<assertion>\(\?<?[=!])
    |(?P<opening>\((?:\?:|\?P?<[A-Za-z_]\w*>)?(?!\?))
    |(?P<closing>\))
    |(?P<boundary>\\[bB])
    |(?P<start>\^)
    |(?P<end>\$)
    |(?P<or>\|)
    |(?P<repeat>(?:[*+?]|\{{[0-9]{{1,5}}(?:,[0-9]{{0,5}})?\}})\??)
    |(?P<class>\[\^?(?:{_ESCAPE}|[^\[\]\\^])+\])
    |(?P<atom>{_ESCAPE}|[^\\\[\](){{}}*+?|^$])
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_OTHER_ELSEWHERE = re.compile(r"&&|--|~~|\|\|")
"""Character class syntax with another meaning in Rust."""
_CATEGORY = re.compile(r"\\[pP]\{[A-Z][a-z]?\}")


@dataclass(frozen=True, slots=True)
class Held:
    """A regular expression reduced to what a grammar can enforce.

    Attributes:
        pattern: Expression that matches whatever the original does.
        exact: Whether both match the same texts.
    """

    pattern: str
    exact: bool


@dataclass(slots=True)
class _Token:
    """A token of an expression.

    Attributes:
        kind: Name of the token's group in `_TOKEN`.
        text: Text of the token.
        group: Index of the parenthesis that opens the enclosing group; -1: none.
        pair: Index of the matching parenthesis, for parentheses.
    """

    kind: str
    text: str
    group: int
    pair: int = -1


def held(pattern: str) -> Held | None:
    """Return the enforceable part of an expression; None if there is none, or it is unknown."""
    tokens = _tokens(pattern) if len(pattern) <= MAX_PATTERN else None
    if tokens is None:
        return None
    kept: list[str] = []
    exact, at = True, 0
    while at < len(tokens):
        token, end = tokens[at], at
        if token.kind == "assertion":
            end = token.pair
        asserts = token.kind in {"assertion", "boundary"} or (
            (token.kind == "start" and not _leads(tokens, at))
            or (token.kind == "end" and not _ends(tokens, at))
        )
        if (asserts or token.kind in {"start", "end"}) and _repeated(tokens, end):
            return None
        if asserts:
            exact = False
        elif not (token.kind in {"start", "end"} and kept[-1:] == [token.text]):
            kept.append("(" if token.kind == "opening" else token.text)
        at = end + 1
    text = "".join(kept)
    return Held(text, exact) if _compiles(text) else None


def _tokens(pattern: str) -> list[_Token] | None:
    """Return the tokens of an expression; None if Rust might read one differently."""
    tokens: list[_Token] = []
    opened: list[int] = []
    at = 0
    while at < len(pattern):
        match = _TOKEN.match(pattern, at)
        if match is None or match.lastgroup is None:
            return None
        token = _Token(match.lastgroup, match[0], opened[-1] if opened else -1)
        if token.kind == "class" and _OTHER_ELSEWHERE.search(token.text):
            return None
        if token.kind == "repeat" and tokens and tokens[-1].kind == "repeat":
            return None
        if token.kind == "closing":
            if not opened:
                return None
            token.pair = opened.pop()
            token.group = tokens[token.pair].group
            tokens[token.pair].pair = len(tokens)
        elif token.kind in {"opening", "assertion"}:
            opened.append(len(tokens))
        tokens.append(token)
        at = match.end()
    return None if opened else tokens


def _leads(tokens: Sequence[_Token], at: int) -> bool:
    """Return whether nothing can match before a token."""
    while at > 0:
        before = tokens[at - 1]
        if before.kind == "start":
            at -= 1
            continue
        at = tokens[at].group if before.kind == "or" else at - 1
        if at >= 0 and (tokens[at].kind != "opening" or _repeated(tokens, tokens[at].pair)):
            return False
    return True


def _ends(tokens: Sequence[_Token], at: int) -> bool:
    """Return whether nothing can match after a token."""
    while at < len(tokens) - 1:
        after = tokens[at + 1]
        if after.kind == "end":
            at += 1
            continue
        if after.kind == "or":
            if after.group < 0:
                return True
            at = tokens[after.group].pair
        else:
            at += 1
        if tokens[at].kind != "closing" or _repeated(tokens, at):
            return False
    return True


def _repeated(tokens: Sequence[_Token], at: int) -> bool:
    return at + 1 < len(tokens) and tokens[at + 1].kind == "repeat"


def _compiles(pattern: str) -> bool:
    """Return whether tokens form an expression that is valid in all dialects."""
    try:
        re.compile(_CATEGORY.sub(r"\\w", pattern))
    except (re.error, OverflowError, RecursionError):
        return False
    return True
