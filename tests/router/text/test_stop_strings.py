import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.router.text.stop_strings import StopStrings

TEXTS = st.text(alphabet="ab<é", max_size=30)
STRINGS = st.lists(st.text(alphabet="ab<é", min_size=1, max_size=5), min_size=1, max_size=4)


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def stream(strings, parts, *, include=False, armed_from=0):
    """Return each part's shown text, the stop string found, and the part that completed it."""
    watch = StopStrings(strings, include=include)
    shown = []
    for i, part in enumerate(parts):
        shown.append(watch.feed(part, armed=i >= armed_from))
        if watch.found is not None:
            return shown, watch.found, i
    return [*shown, watch.flush()], None, None


def one_shot(strings, parts):
    """The definition: the first part that completes one; of several, the first to start."""
    for i in range(len(parts)):
        text = "".join(parts[: i + 1])
        found = [(text.find(s), len(s), s) for s in strings if s in text]
        if found:
            start, _, string = min(found)
            return text[:start], string, i
    return "".join(parts), None, None


@given(TEXTS, STRINGS, st.lists(st.integers(0, 30)))
def test_streaming_equals_one_shot(text, strings, cuts):
    parts = pieces(text, cuts)
    shown, found, at = stream(strings, parts)
    assert ("".join(shown), found, at) == one_shot(strings, parts)


@given(TEXTS, STRINGS, st.lists(st.integers(0, 30)))
def test_included_string_is_the_end(text, strings, cuts):
    parts = pieces(text, cuts)
    shown, found, _ = stream(strings, parts, include=True)
    plain, _, _ = stream(strings, parts)
    assert "".join(shown) == "".join(plain) + (found or "")


@given(TEXTS, STRINGS, st.lists(st.integers(0, 30)))
def test_nothing_of_a_stop_string_is_ever_shown(text, strings, cuts):
    parts = pieces(text, cuts)
    shown, found, _ = stream(strings, parts)
    if found is not None:
        before = "".join(shown)
        assert not any(s in before for s in strings)
        assert text.startswith(before + found)


@given(TEXTS, STRINGS, st.lists(st.integers(0, 30)))
def test_no_more_is_held_than_needed(text, strings, cuts):
    parts = pieces(text, cuts)
    watch = StopStrings(strings)
    fed = shown = ""
    for part in parts:
        fed += part
        shown += watch.feed(part)
        if watch.found is not None:
            return
        held = fed[len(shown) :]
        assert fed == shown + held
        assert not held or any(s.startswith(held) and s != held for s in strings)


@given(TEXTS, STRINGS, st.lists(st.integers(0, 30)), st.integers(0, 5))
def test_unarmed_text_does_not_end(text, strings, cuts, armed_from):
    parts = pieces(text, cuts)
    shown, found, at = stream(strings, parts, armed_from=armed_from)
    if found is None:
        assert "".join(shown) == text
        tail = "".join(parts[armed_from:])
        assert not any(s in tail for s in strings)
    else:
        assert at >= armed_from
        assert text.startswith("".join(shown) + found)


@pytest.mark.parametrize(
    ("strings", "text", "shown", "found"),
    [
        (["world", "lo wo"], "hello world", "hel", "lo wo"),
        (["ab", "abc"], "xabc", "x", "ab"),
        (["aab"], "aaab", "a", "aab"),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
    ],
)
def test_examples(strings, text, shown, found):
    for parts in ([text], list(text)):
        got, string, _ = stream(strings, parts)
        assert ("".join(got), string) == (shown, found)


def test_a_string_begun_unarmed_counts_when_it_ends_armed():
    watch = StopStrings(["abc"])
    assert watch.feed("xab", armed=False) == "x"
    assert watch.feed("c") == ""
    assert watch.found == "abc"
