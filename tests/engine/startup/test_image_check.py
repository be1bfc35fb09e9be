"""The start-up's check of a prompt with an image refuses models that would be served wrongly."""

import pytest
import torch

from octavo.engine.execution import inputs
from octavo.engine.models import load_model, vision
from octavo.engine.models.checks.self_check import SelfCheckError
from octavo.engine.models.checks.trial_image import trial_image
from octavo.engine.models.forward import EagerForward
from octavo.engine.scheduling.request import Request
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import image_check
from octavo.engine.startup.build import build
from tests.vision_models import save_vision_model


def start(path, **settings):
    settings = {"dtype": "float32", "swap_space": 0.01, "num_blocks": 16, "compile": "off"}
    return build(EngineSettings(model=str(path), **settings))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the directory of a family's model, saved once."""
    made = {}

    def path_of(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            save_vision_model(kind, made[kind])
        return made[kind]

    return path_of


def attend_causally(patch):
    patch.setattr(vision, "BIDIRECTIONAL", frozenset())


def count_positions_on(patch):
    patch.setattr(vision.Vision, "rotary_positions", lambda *_: None)


def swap_rows_and_columns(patch):
    positions = vision.Vision.rotary_positions
    patch.setattr(vision.Vision, "rotary_positions", lambda *given: positions(*given)[[0, 2, 1]])


def keep_places_behind_prompts(patch):
    patch.setattr(Request, "rotary_shift", 0)


def place_one_later(patch):
    with_images = EagerForward.with_images

    def later(self, tokens, positions, logits, rows, embeddings):
        return with_images(self, tokens, positions, logits, rows + 1, embeddings)

    patch.setattr(EagerForward, "with_images", later)


def forget_earlier_chunks(patch):
    made = inputs.StepImages

    def of_first_rows(rows, parts, positions):
        first = [(key, slice(0, part.stop - part.start)) for key, part in parts]
        return made(rows, first, positions)

    patch.setattr(inputs, "StepImages", of_first_rows)


def skip_projector(patch):
    split = image_check.split_vision

    def without(model):
        made = split(model)
        made._parts.multi_modal_projector.linear_2 = torch.nn.Identity()
        return made

    patch.setattr(image_check, "split_vision", without)


def drop_deep_features(patch):
    encode = vision.Vision.encode
    patch.setattr(vision.Vision, "encode", lambda *given: encode(*given)[:1])


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("gemma3", attend_causally),
        ("qwen2_5_vl", count_positions_on),
        ("qwen2_5_vl", swap_rows_and_columns),
        ("qwen3_vl", keep_places_behind_prompts),
        ("qwen3_vl", drop_deep_features),
        ("smolvlm", place_one_later),
        ("llava", forget_earlier_chunks),
        ("llava", skip_projector),
    ],
)
def test_a_fault_is_refused(saved, monkeypatch, kind, fault):
    path = saved(kind)
    fault(monkeypatch)
    with pytest.raises(SelfCheckError, match="prompt with an image"):
        start(path)


def test_a_model_whose_images_cannot_be_checked_reads_text_alone(saved, monkeypatch):
    def refuse(_):
        raise ValueError("no such size")

    monkeypatch.setattr(image_check, "make_twin", refuse)
    parts = start(saved("llava"))
    assert parts.vision is None
    assert not parts.limits.images


def test_a_large_model_is_checked_once(saved, monkeypatch):
    monkeypatch.setattr(load_model, "is_small", lambda _: False)
    made = []
    monkeypatch.setattr(image_check, "trial_image", lambda c: made.append(c) or trial_image(c))
    for _ in range(2):
        start(saved("llava"))
    assert len(made) == 1
