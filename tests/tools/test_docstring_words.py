"""The checker of words in docstrings, and its list of clean folders."""

import pytest

from tools.docstring_words import CLEAN, ROOT, check, complaints

ATTRIBUTES = '''
class Shape:
    """A shape.

    Attributes:
        width: {}
        height: The height of the shape,
            as on paper.
    """
'''


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Of the shape.", "noun"),
        ("as for height.", "noun"),
        ("Whose area is known.", "noun"),
        ("Likewise.", "Likewise"),
        ("the width of the shape.", "capital"),
        ("`[n]` int32: the width of each shape.", None),
        ("The width of the shape.", None),
        ("Offset of the shape.", None),
        ("Likewise, in blocks.", None),
    ],
)
def test_an_attribute_begins_with_a_noun(text, fault):
    found = list(complaints(ATTRIBUTES.format(text)))
    assert [(line, fault in what) for line, what in found] == ([(6, True)] if fault else [])


@pytest.mark.parametrize(
    ("docstring", "fault"),
    [
        ("Return what is known.", "returned"),
        ("Likewise.", "Likewise"),
        ("Return it.\n\n    Returns:\n        Of both, the larger one.", "noun"),
        ("Read it.\n\n    Raises:\n        OSError: As of `read`.", "noun"),
        ("Read it.\n\n    Raises:\n        OSError: Nothing\n            of it can be read.", None),
        ("Return the value.\n\n    It is\n    of this kind.", None),
        ("Return it.\n\n    Returns:\n        The larger one\n        of both.", None),
    ],
)
def test_a_function_says_what_it_does(docstring, fault):
    found = list(complaints(f'def function():\n    """{docstring}"""\n'))
    assert [fault in what for _, what in found] == ([True] if fault else [])


def test_a_constants_text_begins_with_a_noun():
    assert [
        line for line, _ in complaints('SIZE = 1\n"""Of a block."""\nNAME = "Of a block."\n')
    ] == [2]


def test_clean_folders_stay_clean():
    assert check(ROOT / name for name in CLEAN) == []
