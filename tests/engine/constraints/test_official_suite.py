"""The official JSON-Schema-Test-Suite: no wrong document is allowed, no wrong output finished."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from octavo.engine.constraints.constraint import Constraint, ConstraintError, ConstraintKind
from octavo.engine.constraints.grammar import compile_grammar
from octavo.engine.constraints.tokens import read_tokens
from octavo.engine.constraints.trial import try_constraint
from tests.engine.constraints.runner import EOS, Runner, decode
from tests.engine.constraints.schemas import check

pytestmark = pytest.mark.slow

LEAST_SERVED = 120
"""Number of the suite's schemas that are served; the others are refused."""


PACKAGE = "jsonschema==4.26.0"
"""A package whose source contains the suite."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> list[dict]:
    """Return groups of draft 2020-12: a schema each, with valid and invalid documents."""
    folder = tmp_path_factory.mktemp("suite")
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    if subprocess.run([*download, "-d", folder, PACKAGE], check=False).returncode:
        pytest.skip(f"pip cannot download {PACKAGE}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    files = sorted(folder.glob("*/json/tests/draft2020-12/*.json"))
    return [group for file in files for group in json.loads(file.read_text())]


@pytest.fixture(scope="module")
def tokens(byte_model):
    return read_tokens(Path(byte_model), EOS + 1, [EOS]).build()


def test_no_document_that_breaks_its_schema_is_allowed(suite, tokens):
    served, wrong = 0, []
    for group in suite:
        schema = json.dumps(group["schema"])
        constraint = Constraint(ConstraintKind.JSON_SCHEMA, (schema,))
        try:
            try_constraint(constraint, tokens)
        except ConstraintError:
            continue
        served += 1
        for test in group["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            ids = tokens.tokenize_str(text)
            matcher = compile_grammar(constraint, tokens)
            allowed = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            if allowed and not test["valid"]:
                wrong.append((schema, text))
    assert not wrong
    assert served >= LEAST_SERVED


def test_every_finished_output_keeps_to_its_schema(suite, byte_model):
    runner = Runner(byte_model)
    try:
        asked = [
            (group["schema"], runner.submit("json_schema", json.dumps(group["schema"]), n=4))
            for group in suite
        ]
        finished = 0
        for schema, request_id in asked:
            ended = runner.wait(request_id, 300)
            if ended.failure is not None:
                assert ended.failure.field == "constraint"
                continue
            for index, reason in ended.reasons.items():
                if reason == "EOS":
                    check(decode(ended.tokens[index]), schema)
                    finished += 1
        assert finished > LEAST_SERVED
    finally:
        runner.close()
