"""Images of a real server over gRPC and HTTP: transformers' answers, or a precise error."""

import base64
import io

import anthropic
import ollama
import openai
import pytest
from PIL import Image

import octavo
from octavo.common.models.tokenizer import load_tokenizer
from octavo.common.ports import free_port
from octavo.router.images.processor import load_processor
from octavo.router.text.tokenizer import Tokenizer
from octavo.v1 import generation_pb2
from tests.integration.harness import Server
from tests.vision_models import save_vision_model

TOKENS = 12
ASKED = "what is it?"


def png(number, size=(40, 23)):
    file = io.BytesIO()
    Image.effect_noise(size, 40 + number).convert("RGB").save(file, "PNG")
    return file.getvalue()


IMAGES = [png(1), png(2, (31, 77))]


def data_url(data, media_type="image/png"):
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision")
    return path, save_vision_model("smolvlm", path)


@pytest.fixture(scope="module")
def server(model, launch_shared) -> Server:
    port = free_port()
    made = launch_shared(
        *("serve", "--model", str(model[0]), "--dtype", "float32", "--served-model-name", "tiny"),
        *("--num-blocks", "128", "--swap-space", "0.01", "--http-port", str(port), "--ollama"),
    )
    made.http = f"http://127.0.0.1:{port}"
    return made.wait_ready()


@pytest.fixture(scope="module")
def expected(model):
    """What transformers answers to `ASKED` behind both images."""
    path, whole = model
    tokenizer = load_tokenizer(path)
    processor = load_processor(path, tokenizer)
    chat = generation_pb2.ChatPrompt()
    message = chat.messages.add(role="user")
    for _ in IMAGES:
        message.parts.add().image.SetInParent()
    message.parts.add(text=ASKED)
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data in IMAGES]
    text = Tokenizer(tokenizer, images=processor).render(chat)
    inputs = processor.transformers(
        text=[text], images=[images], return_tensors="pt", add_special_tokens=False
    )
    answer = whole.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    tokens = answer[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True), inputs["input_ids"].shape[1]


def content(*parts):
    shown = [{"type": "image_url", "image_url": {"url": data_url(data)}} for data in parts]
    return [*shown, {"type": "text", "text": ASKED}]


def test_the_clients_of_each_api_get_transformers_answer(server, expected):
    text, tokens = expected
    asks = openai.OpenAI(base_url=f"{server.http}/v1", api_key="x", max_retries=0)
    answer = asks.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content(*IMAGES)}],
        max_tokens=TOKENS,
        temperature=0,
    )
    assert answer.choices[0].message.content == text
    assert answer.usage.prompt_tokens == tokens
    parts = [{"type": "input_image", "image_url": data_url(d), "detail": "auto"} for d in IMAGES]
    response = asks.responses.create(
        model="tiny",
        input=[{"role": "user", "content": [*parts, {"type": "input_text", "text": ASKED}]}],
        max_output_tokens=TOKENS,
        temperature=0,
    )
    assert response.output_text == text
    blocks = [
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": "image/png",
                "data": base64.b64encode(data).decode(),
            },
        }
        for data in IMAGES
    ]
    message = anthropic.Anthropic(base_url=server.http, api_key="x", max_retries=0).messages.create(
        model="tiny",
        messages=[{"role": "user", "content": [*blocks, {"type": "text", "text": ASKED}]}],
        max_tokens=TOKENS,
        extra_body={"temperature": 0},
    )
    assert message.content[0].text == text
    chat = ollama.Client(server.http).chat(
        "tiny",
        [{"role": "user", "content": ASKED, "images": IMAGES}],
        options={"temperature": 0, "num_predict": TOKENS},
    )
    assert chat.message.content == text
    with octavo.Client(server.address) as client:
        images = [octavo.Image(data) for data in IMAGES]
        chat = [octavo.Message("user", [*images, ASKED])]
        result = client.complete(chat, max_tokens=TOKENS, temperature=0)
        assert result.text == text
        assert result.usage.cached_tokens == (tokens - 1) // 16 * 16


@pytest.mark.parametrize(
    ("data", "media_type", "why"),
    [
        (b"", "image/png", "is empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml", "must be one of"),
        (IMAGES[0], "image/jpeg", "is image/png, not image/jpeg"),
        (IMAGES[0][:-30], "image/png", "cannot be decoded"),
    ],
)
def test_an_image_that_cannot_be_shown_is_refused_by_its_place(server, data, media_type, why):
    asks = openai.OpenAI(base_url=f"{server.http}/v1", api_key="x", max_retries=0)
    part = {"type": "image_url", "image_url": {"url": data_url(data, media_type)}}
    with pytest.raises(openai.BadRequestError, match=why) as refused:
        asks.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, part]}],
        )
    assert refused.value.param == "messages[0].content[1].image_url.url"


def test_a_model_without_vision_refuses_images_by_name(served):
    asks = openai.OpenAI(base_url=f"{served.http}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="reads no images"):
        asks.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": content(IMAGES[0])}]
        )
