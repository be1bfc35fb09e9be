"""The types of arguments in schemas."""

import itertools

import pytest

from octavo.router.requests.parsers.tool_schema import types_of, values_of


def chain(links: int) -> dict:
    """Each definition refers to the next one twice."""
    names = [f"a{i}" for i in range(links + 1)]
    twice = {
        one: {"anyOf": [{"$ref": f"#/$defs/{other}"}] * 2}
        for one, other in itertools.pairwise(names)
    }
    return {"$defs": twice | {names[-1]: {"type": "string"}}}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("links", [5, 30, 3_000])
def test_parts_that_many_refer_to_are_read_once(links):
    root, part = chain(links), {"$ref": "#/$defs/a0"}
    values = values_of(part, root)
    if links == 5:
        assert types_of(part, root) == {"string"}
        assert values is not None
        assert values.strings == ({"type": "string"},)
    else:
        assert types_of(part, root) in ({"string"}, frozenset())  # unknown if it is too deep


def test_a_part_of_itself_is_unknown():
    root = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}}
    assert types_of({"$ref": "#/$defs/a"}, root) == frozenset()
    assert values_of({"$ref": "#/$defs/a"}, root) is None
