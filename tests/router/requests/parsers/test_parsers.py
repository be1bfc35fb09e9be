"""Every parser gives the same result wherever an output's text is cut."""

import itertools
import json
from dataclasses import replace

import pytest

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers import REASONING_FORMATS, TOOL_FORMATS
from octavo.router.requests.parsers.formats import OutputPlan
from octavo.router.requests.parsers.parser import Parser, PieceKind
from octavo.router.text.model_text import ModelText
from tests.router.requests.parsers.outputs import EXAMPLES, GEMMA, SCHEMAS, Example

TOOLS = tuple(OfferedTool(name, schema) for name, schema in SCHEMAS.items())


def parser_of(example: Example) -> Parser:
    context = OutputPlan(ModelText(response_template=GEMMA), example.tail, False, TOOLS)
    parser = TOOL_FORMATS[example.format].parser(context)
    if example.thinks:
        parser = REASONING_FORMATS[example.thinks].parser(context, parser)
    return parser


def read(parser: Parser, pieces) -> tuple[list, str, str]:
    calls, content, reasoning = [], "", ""
    for kind, text in itertools.chain(*map(parser.feed, pieces), parser.flush()):
        assert text
        if kind == PieceKind.CALL:
            calls.append([text, ""])
        elif kind == PieceKind.ARGUMENTS:
            calls[-1][1] += text
        elif kind == PieceKind.CONTENT:
            content += text
        else:
            reasoning += text
    return [(name, json.loads(arguments)) for name, arguments in calls], content, reasoning


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.format}-{e.name}")
def test_every_cut_reads_the_same(example):
    text = example.output
    wanted = (example.calls, example.content, example.reasoning)
    assert read(parser_of(example), [text]) == wanted
    assert read(parser_of(example), text) == wanted
    for at in range(1, len(text)):
        assert read(parser_of(example), [text[:at], text[at:]]) == wanted, text[:at]


def test_every_format_has_examples():
    assert {example.format for example in EXAMPLES} == set(TOOL_FORMATS)
    thought = {example.thinks for example in EXAMPLES} | {"gpt_oss", "response_template"}
    assert thought - {None} >= set(REASONING_FORMATS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.format}-{e.name}")
def test_an_output_may_end_anywhere(example):
    for at in range(len(example.output)):
        parser = parser_of(example)
        pieces = [*parser.feed(example.output[:at]), *parser.flush()]
        calls = [piece.text for piece in pieces if piece.kind == PieceKind.CALL]
        assert calls == [name for name, _ in example.calls][: len(calls)]


def test_a_prompt_that_a_template_cannot_read_is_passed_over():
    """For example, an output whose end has no anchor, and text that only looks like a call."""
    example = next(one for one in EXAMPLES if one.format == "response_template" and one.calls)
    prompt = replace(example, tail="<|tool_call>call:now{<tool_call|> and then:")
    assert read(parser_of(prompt), [example.output]) == read(parser_of(example), [example.output])
