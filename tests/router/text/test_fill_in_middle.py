import grpc
import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from octavo.common import rpc
from octavo.router.text.fill_in_middle import FORMS
from octavo.router.text.tokenizer import Tokenizer, last_tokens
from octavo.v1 import generation_pb2
from tests.router.conftest import byte_level_tokenizer


def tokenizer(*tokens: str, begins=False) -> Tokenizer:
    backend = byte_level_tokenizer()
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    if begins:
        backend.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize("names", FORMS)
@pytest.mark.parametrize("begins", [False, True])
def test_the_output_comes_between_two_texts(names, begins):
    prefix, suffix, middle = names
    model = tokenizer(*names, begins=begins)
    request = generation_pb2.GenerateRequest(text="def f():", suffix="return 1")
    shown = model.decode(model.encode_prompt(request, 100), keep_special_tokens=True)
    start = "<s>" if begins else ""
    assert shown == f"{start}{prefix}def f():{suffix}return 1{middle}"


def test_a_model_that_cannot_is_named():
    request = generation_pb2.GenerateRequest(text="a", suffix="b")
    with pytest.raises(rpc.RpcError, match="suffix is not supported by this model") as caught:
        tokenizer("<fim_prefix>").encode_prompt(request, 100)
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.field == "suffix"


def test_a_prompt_keeps_its_last_tokens():
    model = tokenizer(begins=True)
    request = generation_pb2.GenerateRequest(text="abcdef")
    assert (
        model.decode(model.encode_prompt(request, 2, kept=3), keep_special_tokens=True) == "<s>ef"
    )
    assert last_tokens([1, 2, 3], 3, [1]) == [1, 2, 3]
    assert last_tokens([1, 2, 3], 2, [1]) == [1, 3]
    assert last_tokens([1, 2, 3], 1, [1]) == [3]
