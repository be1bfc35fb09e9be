"""Images of a real server over gRPC and HTTP: transformers' answers, or a precise error."""

import base64
import io
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import anthropic
import ollama
import openai
import psutil
import pytest
from PIL import Image

import octavo
from octavo.common.models.tokenizer import load_tokenizer
from octavo.common.ports import free_port
from octavo.router.images.processor import load_processor
from octavo.router.text.tokenizer import Tokenizer
from octavo.v1 import generation_pb2
from tests.integration.harness import Server
from tests.integration.image_attack import BAD_URLS, attack, data_url
from tests.router.images.test_decode import BAD
from tests.vision_models import save_vision_model

TOKENS = 12
ASKED = "what is it?"


def png(number, size=(40, 23)):
    file = io.BytesIO()
    Image.effect_noise(size, 40 + number).convert("RGB").save(file, "PNG")
    return file.getvalue()


IMAGES = [png(1), png(2, (31, 77))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision")
    whole = save_vision_model("smolvlm", path)
    # Without an end, outputs cannot be constrained.
    whole.generation_config.eos_token_id = load_tokenizer(path).eos_token_id
    whole.generation_config.save_pretrained(path)
    return path, whole


@pytest.fixture(scope="module")
def server(model, launch_shared) -> Server:
    port = free_port()
    made = launch_shared(
        *("serve", "--model", str(model[0]), "--dtype", "float32", "--served-model-name", "tiny"),
        *("--num-blocks", "128", "--swap-space", "0.01", "--http-port", str(port), "--ollama"),
        *("--allow-image-urls", "https://localhost/*"),
    )
    made.http = f"http://127.0.0.1:{port}"
    return made.wait_ready()


@pytest.fixture(scope="module")
def generate(model):
    """Return a function that returns transformers' answer to `ASKED` behind both images."""
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
    count = inputs["input_ids"].shape[1]

    def answer(only=None):
        allowed = None if only is None else tokenizer.convert_tokens_to_ids(list(only))
        tokens = whole.generate(
            **inputs,
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
            prefix_allowed_tokens_fn=None if only is None else lambda *_: allowed,
        )
        return tokenizer.decode(tokens[0, count:], skip_special_tokens=True), count

    return answer


@pytest.fixture(scope="module")
def expected(generate):
    """What transformers answers to `ASKED` behind both images."""
    return generate()


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


def test_constrained_outputs_are_transformers(server, generate):
    with octavo.Client(server.address) as client:
        chat = [octavo.Message("user", [*map(octavo.Image, IMAGES), ASKED])]
        regex = f"[abcdef]{{{TOKENS}}}"
        result = client.complete(chat, max_tokens=TOKENS, temperature=0, regex=regex)
        assert result.text == generate("abcdef")[0]
        schema = {"type": "object", "properties": {"n": {"enum": [17]}}, "required": ["n"]}
        result = client.complete(chat, max_tokens=40, temperature=0, json_schema=schema)
        assert json.loads(result.text) == {"n": 17}


def test_the_playground_asks_about_images(server, browser, expected):
    page = browser.new_page()
    page.goto(server.http)
    page.wait_for_selector("#model option", state="attached")
    files = [
        {"name": f"{number}.png", "mimeType": "image/png", "buffer": data}
        for number, data in enumerate([png(3), IMAGES[0]])
    ]
    page.set_input_files("#files", files)
    page.click("[aria-label='Remove 0.png']")
    dropped = page.evaluate_handle(
        """data => {
            const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], "2.png", { type: "image/png" }));
            return transfer;
        }""",
        base64.b64encode(IMAGES[1]).decode(),
    )
    page.dispatch_event("#composer", "drop", {"dataTransfer": dropped})
    page.wait_for_selector("[aria-label='Remove 2.png']")
    page.click("#settings summary")
    page.fill("#max_tokens", str(TOKENS))
    page.fill("#prompt", ASKED)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".answer:not(.working)")
    assert page.inner_text(".asked").splitlines() == ["[1.png]", "[2.png]", ASKED]
    assert page.inner_text("#summary").endswith(f"of {expected[1]} prompt tokens cached")
    page.close()


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


@pytest.mark.slow
def test_bad_images_and_urls_take_no_memory_and_leave_others_be(server):
    """Send bad requests beside streams; -s prints the times between the streams' tokens."""
    processes = [psutil.Process(server.pid), *server.children()]

    def resident():
        return sum(each.memory_info().rss for each in processes) / (1 << 20)

    def p99(running):
        """Return the 99th percentile of the times between tokens of streams, in milliseconds."""
        gaps = []
        with octavo.Client(server.address) as client:
            while running():
                last = None
                for _ in client.generate("abc", max_tokens=400, ignore_eos=True):
                    now = time.perf_counter()
                    gaps += [] if last is None else [now - last]
                    last = now
        return 1000 * sorted(gaps)[int(0.99 * len(gaps))]

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        answers = pool.submit(attack, server.http, 1, 0).result()
        assert len(answers) == len(BAD) - 1 + len(BAD_URLS)
        for name, (status, error) in answers.items():
            assert (status, error["param"]) == (400, "messages[0].content[1].image_url.url"), name
        end, before = time.monotonic() + 10, resident()
        alone = p99(lambda: time.monotonic() < end)
        beside = {}
        for pause in (0.1, 0.0):
            attacks = pool.submit(attack, server.http, 4, pause)
            beside[pause] = p99(lambda running=attacks: not running.done())
            attacks.result()
    print(f"p99 between tokens in ms: {alone:.1f} alone, {beside} by pauses between bad requests")
    assert beside[0.1] < 2 * alone
    grown = resident() - before
    print(f"memory: {grown:+.0f} MiB")
    assert grown < 150
