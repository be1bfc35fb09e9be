"""Ranks and stages of models that read images answer as transformers does."""

import pickle

import pytest

from tests.engine.models.test_vision import TOKENS, Asked
from tests.engine.parallel.harness import run_kind
from tests.engine.parallel.workload import PROMPTS
from tests.vision_models import FAMILIES

COUNT = 8
RANKS = ("two ranks", "two stages", "two stages of two")


def save_asked(kinds, folder):
    """Save models and their prompts; return the cases and transformers' answers by kind."""
    cases, expected = {}, {}
    for kind in kinds:
        asked = Asked(kind, folder / kind, COUNT)
        prompts = [(asked.prompts[i][0], asked.images(i), TOKENS) for i in range(COUNT)]
        (folder / kind / PROMPTS).write_bytes(pickle.dumps(prompts))
        lengths = [len(tokens) for tokens, *_ in prompts]
        pairs = zip(asked.expected, lengths, strict=True)
        expected[kind] = [[answer[length:]] for answer, length in pairs]
        settings = {"num_blocks": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}
        settings |= {"block_size": 16, "compile": "auto"}
        cases[kind] = {"model": str(folder / kind), "work": "pictured", "settings": settings}
    return cases, expected


def assert_transformers_answers(kinds, ranks, folder):
    cases, expected = save_asked(kinds, folder)
    for name in ranks:
        found = run_kind(name, cases, folder)
        for kind in kinds:
            assert found[kind]["tokens"] == expected[kind], (name, kind)
            assert found[kind]["compiled"], kind


def test_two_ranks_answer_questions_about_images(tmp_path):
    assert_transformers_answers(["qwen3_vl"], ["two ranks"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_all_families_read_images_on_ranks(name, tmp_path):
    assert_transformers_answers(list(FAMILIES), [name], tmp_path)
