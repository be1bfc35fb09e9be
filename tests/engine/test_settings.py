"""The names of a model."""

import pytest

from octavo.common.settings import SettingsError
from octavo.engine.settings import EngineSettings


def names(**given):
    return EngineSettings.load(model="owner/model", **given).model_names


def test_the_names_of_a_model(monkeypatch, tmp_path):
    assert names() == ["owner/model"]
    assert names(served_model_name=["a", "b,c"]) == ["a", "b,c"]
    file = tmp_path / "octavo.toml"
    file.write_text('[engine]\nserved-model-name = ["a", "b"]')
    assert names(config=file) == ["a", "b"]
    file.write_text('served_model_name = "a"')
    assert names(config=file) == ["a"]
    monkeypatch.setenv("OCTAVO_SERVED_MODEL_NAME", "c, d")
    assert names(config=file) == ["c", "d"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"served_model_name": ["a", "a"]}, "--served-model-name: has a name twice"),
        ({"served_model_name": ["a", ""]}, "--served-model-name: a name is empty"),
        (
            {"served_model_name": ["a", "sql"], "lora": ["sql=/x"]},
            "--lora sql has a name of the model",
        ),
        ({"lora": ["owner/model=/x"]}, "--lora owner/model has a name of the model"),
    ],
)
def test_names_that_are_refused(given, said):
    with pytest.raises(SettingsError, match=said):
        names(**given)
