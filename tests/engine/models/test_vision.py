"""Models that read images answer as transformers' generate does, in float32, token for token.

Prompts are laid out, and images processed, as the router does; transformers' own processor makes
the same tokens of them.
"""

import copy
import io
import random
import time

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.numpy import load

from octavo.common.models.tokenizer import load_tokenizer
from octavo.engine.scheduling.request import BeamSearch, PromptImage, Request, Resumption
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.engine.scheduling.sequence import GroupState
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.engine.startup.capacity import StartupError
from octavo.router.images.decode import decode
from octavo.router.images.processor import load_processor
from octavo.router.requests.placed_images import placed_images
from octavo.router.text.tokenizer import Tokenizer
from octavo.v1 import generation_pb2
from tests.engine.stepper import Stepper, submit
from tests.vision_models import FAMILIES, IMAGE_TOKEN, save_vision_model

TOKENS = 16


def drawn_image(rng, number):
    """Return a PNG of an odd size, with its own content."""
    size = rng.randint(9, 90), rng.randint(9, 90)
    noise = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def drawn_chat(rng, number):
    """Return a chat of texts and up to three images."""
    chat = generation_pb2.ChatPrompt()
    message = chat.messages.add(role="user")
    for i in range(number % 4):
        if rng.random() < 0.7:
            message.parts.add(text="".join(rng.choices("abc <é>\n", k=rng.randint(1, 40))))
        message.parts.add().image.data = drawn_image(rng, 10 * number + i)
    message.parts.add(text="".join(rng.choices("what is it? ", k=rng.randint(1, 60))))
    return chat


class Asked:
    """Chats of a family: how the router lays them out, and what transformers answers."""

    def __init__(self, kind, path, count):
        self.path = path
        self.model = save_vision_model(kind, path)
        tokenizer = load_tokenizer(path)
        self.processor = load_processor(path, tokenizer)
        self.tokenizer = Tokenizer(tokenizer, images=self.processor)
        rng = random.Random(1)
        self.prompts = [self._lay_out(drawn_chat(rng, number)) for number in range(count)]
        self.expected = [
            self.generate(tokens, images, text) for tokens, _, images, text in self.prompts
        ]

    def _lay_out(self, chat):
        files = [part.image.data for part in chat.messages[0].parts if part.HasField("image")]
        images = [decode("image", file, "") for file in files]
        alone = len(images) == 1
        processed = [self.processor.process("image", image, alone=alone) for image in images]
        request = generation_pb2.GenerateRequest(chat=chat)
        tokens = self.tokenizer.encode_prompt(request, None, images=[p.text for p in processed])
        placed = placed_images(processed, tokens, self.processor.image_token_id)
        return tokens, placed, images, self.tokenizer.render(chat)

    def generate(self, tokens, images, text, model=None, **options):
        """Return transformers' answer to a chat, by its own chat template and processor."""
        inputs = self.processor.transformers(
            text=[text],
            images=[images] if images else None,
            return_tensors="pt",
            add_special_tokens=False,
        )
        assert inputs["input_ids"][0].tolist() == tokens, "transformers' processor lays out others"
        if options.get("num_beams") and self.model.config.model_type == "llama4" and images:
            # transformers 5.23 repeats no features without `pooler_output`.
            features = self.model.get_image_features(inputs.pop("pixel_values"), return_dict=True)
            repeated = features.last_hidden_state.repeat(options["num_beams"], 1, 1)
            features.last_hidden_state = repeated
            inputs["mm_encoder_outputs"] = {"image": features}
        fixed = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        options = {"max_new_tokens": TOKENS, **fixed, **options}
        output = (model or self.model).generate(**inputs, **options)
        return output[0].tolist() if len(output) == 1 else output.tolist()

    def again(self, number, **options):
        """Return transformers' answer to a prompt with other options."""
        tokens, _, images, text = self.prompts[number]
        return self.generate(tokens, images, text, **options)

    def images(self, number):
        """Return a prompt's images as the engine takes them."""
        tokens, placed, *_ = self.prompts[number]
        (places,) = np.nonzero(np.array(tokens) == self.processor.image_token_id)
        return tuple(
            PromptImage(
                span,
                places[(places >= span.start) & (places < span.end)],
                load(image.tensors),
            )
            for span, image in placed
        )


@pytest.fixture(scope="module", params=FAMILIES)
def asked(request, tmp_path_factory):
    return Asked(request.param, tmp_path_factory.mktemp(request.param), 20)


def engine_of(asked, **settings):
    settings = {"dtype": "float32", "swap_space": 0.01, "block_size": 16} | settings
    return Stepper(build(EngineSettings(model=str(asked.path), **settings)))


def begin(engine, asked, numbers, *, resumed=0, beam=None, adapter=None, deadline=None, **sampling):
    """Submit prompts, with tokens of another engine; return their groups by number."""
    groups = {}
    for number in numbers:
        images, tokens = asked.images(number), asked.prompts[number][0]
        vision = engine.parts.vision
        request = Request(
            session=0,
            request_id=f"{number}-{time.monotonic_ns()}",
            prompt=tuple(tokens),
            sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
            max_tokens=TOKENS,
            arrival=time.monotonic(),
            resume={0: Resumption(tuple(asked.expected[number][len(tokens) :][:resumed]))},
            beam=beam,
            adapter=adapter,
            deadline=deadline,
            images=images,
            rotary=vision.rotary_positions(tokens, images) if images else None,
        )
        groups[number] = submit(engine.core, request)
    return groups


def ask(engine, asked, numbers, **options):
    """Run prompts at once; return their groups by number."""
    groups = begin(engine, asked, numbers, **options)
    engine.run()
    return groups


def check(asked, groups):
    for number, group in groups.items():
        for sequence in group.sequences:
            assert sequence.token_ids == asked.expected[number], f"prompt {number}"


def test_a_few_answers_are_transformers(tmp_path):
    asked = Asked("qwen3_vl", tmp_path, 4)
    engine = engine_of(asked, num_blocks=64, max_num_batched_tokens=64, max_num_seqs=8)
    check(asked, ask(engine, asked, range(4)))
    again = ask(engine, asked, range(4))
    check(asked, again)
    assert all(group.cached_tokens for number, group in again.items() if number)


def test_an_image_that_fails_later_harms_no_answer_that_has_begun(tmp_path, monkeypatch):
    asked = Asked("llava", tmp_path, 2)  # the second has an image
    engine = engine_of(asked, num_blocks=64, enable_prefix_caching=False)
    begun = begin(engine, asked, [1], n=2)
    for _ in range(4):
        engine.step()

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.parts.vision, "encode", fail)
    engine.scheduler.images.forget()
    (failed,) = ask(engine, asked, [1]).values()
    assert failed.state is GroupState.FINISHED
    assert not any(sequence.num_output for sequence in failed.sequences)
    assert len(begun[1].sequences) == 2
    check(asked, begun)


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_answers_are_transformers_in_chunks_of_64_with_few_blocks(asked, preemption):
    engine = engine_of(
        asked,
        num_blocks=48,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        max_encoder_tokens=200,
        encoder_cache_tokens=100,
        preemption=preemption,
        enable_prefix_caching=False,
    )
    for _ in range(6):  # texts that need ever more blocks
        engine.submit(range(10, 20), max_tokens=100)
    check(asked, ask(engine, asked, range(20)))
    assert engine.scheduler.counters[f"preemptions_{preemption}"]
    assert any(batch.dropped_images for batch in engine.batches)


@pytest.mark.slow
def test_prefixes_are_reused_for_the_same_images_alone(asked):
    engine = engine_of(asked, num_blocks=512)
    numbers = range(20)
    check(asked, ask(engine, asked, numbers))
    again = ask(engine, asked, numbers)
    check(asked, again)
    cached = [group.cached_tokens for group in again.values()]
    lengths = [len(asked.prompts[number][0]) for number in numbers]
    assert cached == [(length - 1) // 16 * 16 for length in lengths]
    # A prompt with another image shares no block from that image on, though its tokens are equal.
    number = next(n for n in numbers if len(asked.prompts[n][1]) == 1)
    tokens, placed, images, text = asked.prompts[number]
    other = asked.processor.process("image", images[0].rotate(180))
    asked.prompts.append((tokens, placed_images([other], tokens, IMAGE_TOKEN), images, text))
    asked.expected.append(asked.generate(tokens, [images[0].rotate(180)], text))
    (group,) = (changed := ask(engine, asked, [len(asked.prompts) - 1])).values()
    check(asked, changed)
    assert group.cached_tokens == placed[0][0].start // 16 * 16


@pytest.mark.slow
def test_several_outputs_share_a_prompt_with_images(asked):
    engine = engine_of(asked, num_blocks=512, max_num_batched_tokens=64, max_num_seqs=32)
    check(asked, ask(engine, asked, range(8), n=3))


@pytest.mark.slow
def test_beams_are_transformers(asked):
    engine = engine_of(asked, num_blocks=512, max_num_batched_tokens=64, max_num_seqs=32)
    for number, group in ask(engine, asked, range(6), beam=BeamSearch(3)).items():
        expected = asked.again(number, num_beams=3, num_return_sequences=3)
        prompt = asked.prompts[number][0]
        assert [prompt + each.token_ids for each in group.beam.hypotheses] == expected


@pytest.mark.slow
def test_adapters_of_the_text_part_are_those_of_peft_and_others_are_refused(asked, tmp_path):
    of_text = r".*(language_model|text_model).*\.layers\..*(q_proj|down_proj)"
    for name, targets in ("text", of_text), ("whole", r".*(q_proj|qkv)"):
        base = copy.deepcopy(asked.model)
        torch.manual_seed(3)
        adapted = get_peft_model(base, LoraConfig(r=4, target_modules=targets))
        for part, parameter in adapted.named_parameters():
            if "lora_" in part:
                torch.nn.init.normal_(parameter, std=0.15)
        adapted.save_pretrained(tmp_path / name, save_embedding_layers=False)
        if name == "text":
            merged = adapted.merge_and_unload().eval()
    engine = engine_of(asked, num_blocks=512, lora=[f"text={tmp_path / 'text'}"])
    adapter = engine.adapter("text")
    groups = ask(engine, asked, range(6), adapter=adapter)
    check(asked, ask(engine, asked, range(6)))
    expected = {number: asked.again(number, model=merged) for number in groups}
    assert {n: group.sequences[0].token_ids for n, group in groups.items()} == expected
    assert expected != {number: asked.expected[number] for number in groups}
    with pytest.raises(StartupError, match=r"vision|visual"):
        engine_of(asked, num_blocks=64, lora=[f"whole={tmp_path / 'whole'}"])


@pytest.mark.slow
def test_another_engine_goes_on_with_an_answer(asked):
    engine = engine_of(asked, num_blocks=512, max_num_batched_tokens=64, max_num_seqs=32)
    check(asked, ask(engine, asked, range(12), resumed=7))


@pytest.mark.slow
@pytest.mark.parametrize("speculation", ["ngram", "suffix"])
def test_drafts_change_no_answer(asked, speculation):
    engine = engine_of(asked, num_blocks=512, speculation=speculation)
    check(asked, ask(engine, asked, range(12)))
    check(asked, ask(engine, asked, range(12)))
    assert engine.scheduler.counters["accepted_tokens"]


@pytest.mark.slow
def test_an_image_that_cannot_be_encoded_fails_its_requests_alone(asked):
    engine = engine_of(asked, num_blocks=512)
    (bad,) = [n for n in range(20) if len(asked.prompts[n][1]) == 1][:1]
    good = [n for n in range(20) if n != bad][:6]
    encode = engine.parts.vision.encode

    def fail(tensors, count):
        if tensors is images[0].tensors:
            raise RuntimeError("no such image")
        return encode(tensors, count)

    images = asked.images(bad)
    asked.images, kept = lambda n: images if n == bad else kept(n), asked.images
    engine.parts.vision.encode = fail
    try:
        for numbers in [bad, *good], [bad]:  # it is not taken for an encoded one later
            groups = ask(engine, asked, numbers)
            failed = groups.pop(bad)
            assert failed.state is GroupState.FINISHED
            assert not any(sequence.num_output for sequence in failed.sequences)
            check(asked, groups)
    finally:
        asked.images, engine.parts.vision.encode = kept, encode
    check(asked, ask(engine, asked, [bad, good[0]]))
