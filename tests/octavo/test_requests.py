import pytest

from octavo import GenerateOptions, InvalidArgumentError, Message
from octavo.client.requests import generate_request, tokenize_request


def test_every_option_has_its_place():
    request = generate_request(
        "x",
        GenerateOptions(
            model="m",
            request_id="r",
            priority=-3,
            cache_salt="s",
            max_tokens=9,
            min_tokens=2,
            stop=["a", "b"],
            stop_token_ids=[5],
            ignore_eos=True,
            include_stop=True,
            temperature=0.0,
            top_p=0.5,
            top_k=4,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={7: -1.0},
            seed=0,
            n=2,
            logprobs=0,
            prompt_logprobs=3,
            token_ids=True,
        ),
    )
    assert (request.model, request.request_id, request.priority) == ("m", "r", -3)
    assert request.cache_salt == "s"
    stop, sampling, output = request.stop, request.sampling, request.output
    assert (stop.max_tokens, stop.min_tokens, list(stop.strings)) == (9, 2, ["a", "b"])
    assert (list(stop.token_ids), stop.ignore_eos, stop.include_in_output) == ([5], True, True)
    assert sampling.HasField("temperature")
    assert sampling.HasField("seed")
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 4, 0.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, dict(sampling.logit_bias)) == (1.5, {7: -1.0})
    assert sampling.n == 2
    assert output.HasField("logprobs")
    assert (output.prompt_logprobs, output.token_ids) == (3, True)
    assert not request.HasField("beam")


def test_what_is_none_is_not_sent():
    nothing = dict.fromkeys(GenerateOptions.__annotations__)
    assert generate_request("x", nothing) == generate_request("x", {})
    assert not generate_request("x", nothing).HasField("sampling")


def test_beam():
    request = generate_request(
        "x", {"beam_width": 4, "length_penalty": 0.5, "early_stopping": True}
    )
    assert (request.beam.width, request.beam.early_stopping) == (4, True)
    assert not request.HasField("sampling")


def test_prompts():
    assert generate_request("hello", {}).text == "hello"
    assert list(generate_request([1, 2], {}).tokens.token_ids) == [1, 2]
    chat = generate_request([Message("user", "a"), {"role": "assistant", "content": "b"}], {}).chat
    assert [(m.role, m.content) for m in chat.messages] == [("user", "a"), ("assistant", "b")]


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompts_reach_the_server_as_such(prompt):
    assert generate_request(prompt, {}).WhichOneof("prompt") is not None


def test_one_stop_string_is_not_its_letters():
    assert list(generate_request("x", {"stop": "END"}).stop.strings) == ["END"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"top_k": -1}, "sampling.top_k"),
        ({"max_tokens": 2**32}, "stop.max_tokens"),
        ({"seed": "x"}, "sampling.seed"),
        ({"stop": [1]}, "stop.strings"),
        ({"stop_token_ids": [-1]}, "stop.token_ids"),
        ({"logit_bias": {"a": 1.0}}, "sampling.logit_bias"),
    ],
)
def test_what_does_not_fit_is_named(options, field):
    with pytest.raises(InvalidArgumentError) as caught:
        generate_request("x", options)
    assert caught.value.violations[0].field == field


def test_token_out_of_range_is_named():
    with pytest.raises(InvalidArgumentError, match=r"tokens\.token_ids"):
        generate_request([-1], {})


def test_what_is_no_prompt():
    with pytest.raises(TypeError, match="item 0"):
        generate_request([{"text": "x"}], {})
    with pytest.raises(TypeError, match="not token ids"):
        tokenize_request([1], None)
    with pytest.raises(TypeError, match="no option 'temprature'"):
        generate_request("x", {"temprature": 1})


def test_text_that_is_no_text():
    with pytest.raises(InvalidArgumentError, match="text"):
        generate_request("\ud800", {})


def test_options_of_a_chat_s_layout_go_into_the_chat():
    options = {
        "chat_template_kwargs": {"enable_thinking": False, "level": 2, "names": ["a", None]},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    for chat in (
        generate_request([Message("user", "a")], options).chat,
        tokenize_request([Message("user", "a")], None, options).chat,
    ):
        assert dict(chat.chat_template_kwargs)["enable_thinking"] is False
        assert chat.chat_template_kwargs["names"][1] is None
        assert chat.HasField("add_generation_prompt")
        assert not chat.add_generation_prompt
        assert chat.continue_final_message


def test_options_of_a_chat_s_layout_need_a_chat():
    with pytest.raises(InvalidArgumentError, match="needs a prompt of messages"):
        generate_request("text", {"add_generation_prompt": True})
    with pytest.raises(InvalidArgumentError, match="needs a prompt of messages"):
        tokenize_request("text", None, {"chat_template_kwargs": {}})
    with pytest.raises(TypeError, match="no option 'temperature'"):
        tokenize_request([Message("user", "a")], None, {"temperature": 1})
    with pytest.raises(InvalidArgumentError, match="chat_template_kwargs"):
        generate_request([Message("user", "a")], {"chat_template_kwargs": {"x": object()}})
