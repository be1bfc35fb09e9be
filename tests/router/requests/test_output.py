import pytest
from tokenizers import Tokenizer, decoders, models

from octavo.router.requests.output import Output
from octavo.router.text.tokenizer import backend_pieces
from octavo.v1.sampling_pb2 import FinishReason, OutputOptions, StopConditions, TokenLogprob

EOS = FinishReason.FINISH_REASON_EOS
LENGTH = FinishReason.FINISH_REASON_LENGTH
STOP_STRING = FinishReason.FINISH_REASON_STOP_STRING
STOP_TOKEN = FinishReason.FINISH_REASON_STOP_TOKEN

WORDS = ["a", "b", "St", "op", "!", "Ã", "©"]  # the last two are the bytes of é


@pytest.fixture(scope="module")
def pieces():
    vocab = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return backend_pieces(tokenizer)


def ids(*words: str) -> list[int]:
    return [7 if word == "</s>" else WORDS.index(word) for word in words]


def make(pieces, stop=None, **options) -> Output:
    return Output(0, pieces, StopConditions(**stop or {}), OutputOptions(**options))


def text(output) -> str:
    delta = output.take()
    return delta.text if delta else ""


def test_tokens_after_the_stop_string_are_dropped(pieces):
    output = make(pieces, {"strings": ["Stop"]}, token_ids=True, logprobs=0)
    token_ids = ids("a", "St", "op", "b", "b")
    output.push(token_ids, [TokenLogprob(token_id=t) for t in token_ids], LENGTH)
    delta = output.take()
    assert delta.text == "a"
    assert list(delta.token_ids) == token_ids[:3]
    assert [logprob.token_id for logprob in delta.logprobs] == token_ids[:1]
    finished = output.finish(5, 2)
    assert finished.reason == STOP_STRING
    assert finished.stop_string == "Stop"
    assert finished.usage.output_tokens == 3


def scored(token_ids):
    return [TokenLogprob(token_id=t) for t in token_ids]


def shown(output) -> list[int]:
    delta = output.take()
    return [one.token_id for one in delta.logprobs] if delta else []


def test_log_probabilities_are_shown_with_the_text_of_their_tokens(pieces):
    output = make(pieces, {"strings": ["top!"]}, logprobs=0)
    for word, expected in [("a", ["a"]), ("St", ["St"]), ("op", []), ("b", ["op", "b"])]:
        output.push(ids(word), scored(ids(word)), 0)
        assert shown(output) == ids(*expected)
    output.push(ids("St", "op", "!", "b"), scored(ids("St", "op", "!", "b")), 0)
    assert output.reason == STOP_STRING
    assert shown(output) == ids("St")  # its first letter is shown


def test_log_probabilities_that_were_held_are_shown_at_another_end(pieces):
    output = make(pieces, {"strings": ["Stop"]}, logprobs=0)
    output.push(ids("St"), scored(ids("St")), 0)
    assert shown(output) == []
    output.push(ids("</s>"), scored(ids("</s>")), EOS)
    assert shown(output) == ids("St", "</s>")


def test_a_stop_string_that_is_shown_has_its_log_probabilities(pieces):
    output = make(pieces, {"strings": ["Stop"], "include_in_output": True}, logprobs=0)
    output.push(ids("a", "St", "op"), scored(ids("a", "St", "op")), 0)
    assert shown(output) == ids("a", "St", "op")


def test_a_hidden_stop_string_of_parts_of_characters_has_no_log_probabilities(pieces):
    output = make(pieces, {"strings": ["é"]}, logprobs=0)
    output.push(ids("a", "Ã", "©"), scored(ids("a", "Ã", "©")), 0)
    assert output.reason == STOP_STRING
    assert shown(output) == ids("a")


def test_possible_stop_string_is_held_then_shown(pieces):
    output = make(pieces, {"strings": ["Stop"]}, token_ids=True)
    output.push(ids("a", "St"), [], 0)
    delta = output.take()
    assert (delta.text, list(delta.token_ids)) == ("a", ids("a", "St"))
    assert output.take() is None
    output.push(ids("b"), [], 0)
    assert text(output) == "Stb"
    output.push(ids("St"), [], LENGTH)
    assert text(output) == "St"
    assert output.reason == LENGTH


def test_min_tokens_hold_for_stop_strings(pieces):
    output = make(pieces, {"strings": ["Stop"], "min_tokens": 4})
    output.push(ids("St", "op", "St", "op", "a"), [], 0)
    assert output.reason == STOP_STRING
    assert text(output) == "Stop"
    assert len(output.token_ids) == 4


@pytest.mark.parametrize(("include", "shown"), [(False, "a"), (True, "a!")])
def test_stop_token(pieces, include, shown):
    output = make(pieces, {"include_in_output": include}, token_ids=True)
    output.push(ids("a", "!"), [], STOP_TOKEN)
    delta = output.take()
    assert delta.text == shown
    assert list(delta.token_ids) == ids("a", "!")
    assert output.finish(1, 0).stop_token_id == ids("!")[0]


@pytest.mark.parametrize(("include", "shown"), [(False, "a"), (True, "a</s>")])
def test_end_of_sequence(pieces, include, shown):
    output = make(pieces, {"include_in_output": include})
    output.push(ids("a"), [], 0)
    output.push(ids("</s>"), [], EOS)
    assert text(output) == shown
    finished = output.finish(1, 0)
    assert finished.reason == EOS
    assert finished.HasField("stop_token_id")


def test_ignored_end_of_sequence_is_not_shown(pieces):
    output = make(pieces)
    output.push(ids("a", "</s>", "b"), [], LENGTH)
    assert text(output) == "ab"
    assert not output.finish(1, 0).HasField("stop_token_id")


def test_incomplete_character_is_shown_at_the_end_only(pieces):
    output = make(pieces)
    output.push(ids("a", "Ã"), [], 0)
    assert text(output) == "a"
    output.push(ids("©", "Ã"), [], 0)
    assert text(output) == "é"
    output.push(ids(), [], LENGTH)
    assert text(output) == "\ufffd"


def test_last_entry_may_hold_no_token(pieces):
    output = make(pieces)
    output.push(ids("a"), [], 0)
    output.push([], [], LENGTH)
    assert output.ended
    assert text(output) == "a"
