"""What a checkpoint says of its embeddings, in sentence-transformers' files."""

import json

import pytest

from octavo.common.models.embedding import read_plan
from octavo.common.models.errors import ModelError

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


@pytest.fixture
def checkpoint(tmp_path):
    def write(*modules, pooling=MEAN, **files):
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling/config.json").write_text(json.dumps(pooling))
        if modules:
            (tmp_path / "modules.json").write_text(json.dumps(modules))
        for name, content in {"config": {}, **files}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


def test_a_checkpoint_says_all(checkpoint):
    directory = checkpoint(
        *(TRANSFORMER, POOLING, NORMALIZE),
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": False},
        config_sentence_transformers={
            "prompts": {"query": "Query: "},
            "default_prompt_name": "query",
            "similarity_fn_name": "cosine",
        },
        config={"matryoshka_dimensions": [64, 32]},
    )
    plan = read_plan(directory)
    assert (plan.pooling, plan.normalize, plan.max_tokens) == ("mean", True, 256)
    assert (plan.prompts, plan.default_prompt) == ({"query": "Query: "}, "query")
    assert (plan.similarity, plan.dimensions, plan.any_dimensions) == ("cosine", (32, 64), False)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "word_embedding_dimension": 8}, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean", "include_prompt": True}, "mean"),
    ],
)
def test_poolings_are_known_by_their_old_and_new_names(checkpoint, pooling, kind):
    plan = read_plan(checkpoint(TRANSFORMER, POOLING, pooling=pooling))
    assert plan.pooling == kind
    assert not plan.normalize


def test_dense_layers_keep_their_order(checkpoint):
    dense = [{"path": f"{i}_Dense", "type": "models.Dense"} for i in (2, 3)]
    plan = read_plan(checkpoint(TRANSFORMER, POOLING, *dense, NORMALIZE))
    assert [folder.name for folder in plan.dense] == ["2_Dense", "3_Dense"]
    assert plan.normalize


def test_flags_say_what_a_checkpoint_does_not(checkpoint):
    directory = checkpoint()
    assert read_plan(directory) is None
    plan = read_plan(directory, "cls", normalize=True, matryoshka=True)
    assert (plan.pooling, plan.normalize, plan.any_dimensions) == ("cls", True, True)


@pytest.mark.parametrize(
    ("modules", "files", "why"),
    [
        ((TRANSFORMER,), {}, "does not say how it pools: set --pooling"),
        ((TRANSFORMER, POOLING, {**POOLING, "type": "models.LSTM"}), {}, "Pooling LSTM, and"),
        ((TRANSFORMER, POOLING, NORMALIZE, NORMALIZE), {}, "perhaps Dense and Normalize"),
        (({**TRANSFORMER, "path": "0_T"}, POOLING), {}, "has its model in '0_T'"),
        (({"kind": "Transformer"},), {}, "is not a list of modules"),
        (
            (TRANSFORMER, POOLING),
            {"pooling": {"pooling_mode_weightedmean_tokens": True}},
            "pools by weightedmean_tokens, and Octavo by one of mean, cls, last, max",
        ),
        ((TRANSFORMER, POOLING), {"pooling": MEAN | {"pooling_mode_cls_token": True}}, "cls, mean"),
        ((TRANSFORMER, POOLING), {"pooling": MEAN | {"include_prompt": False}}, "leaves prompts"),
        (
            (TRANSFORMER, POOLING),
            {"sentence_bert_config": {"do_lower_case": True}},
            "sets do_lower_case",
        ),
        (
            (TRANSFORMER, POOLING),
            {"config_sentence_transformers": {"default_prompt_name": "query"}},
            "has no prompt 'query'",
        ),
    ],
)
def test_what_octavo_does_not_do_is_refused(checkpoint, modules, files, why):
    with pytest.raises(ModelError, match=why):
        read_plan(checkpoint(*modules, **files))


def test_a_flag_that_contradicts_the_checkpoint_is_refused(checkpoint):
    with pytest.raises(ModelError, match=r"--pooling is last, but .* pools by mean"):
        read_plan(checkpoint(TRANSFORMER, POOLING), "last")
