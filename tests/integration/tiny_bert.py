"""A tiny random BERT with a tokenizer of a few words."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, PreTrainedTokenizerFast

from octavo.common.ports import free_port
from tests.integration.conftest import Launch
from tests.integration.harness import Server

WORDS = [
    "a",
    "cat",
    "dog",
    "rome",
    "italy",
    "is",
    "in",
    "the",
    "where",
    "fish",
    "query",
    ":",
    "mat",
    "sat",
    "on",
    "big",
    "small",
    "red",
]


def save_bert(path: Path, kind: Any, **config: Any) -> None:
    """Save a model of one of transformers' Auto classes."""
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(path)
    torch.manual_seed(0)
    model = kind.from_config(
        BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            **config,
        ),
        dtype=torch.float32,
    )
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(path)


def serve_bert(launch: Launch, path: Path) -> Server:
    """Return a ready server of such a model, named bert; `http` is its HTTP address."""
    port = free_port()
    flags = "--model", str(path), "--served-model-name", "bert", "--http-port", str(port)
    server = launch("serve", *flags)
    server.http = f"http://127.0.0.1:{port}"
    return server.wait_ready()
