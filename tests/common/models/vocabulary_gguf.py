"""GGUF files with a tokenizer alone, as from llama.cpp's converter."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer

BYTE = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "▁"


def write(
    path: Path,
    tokenizer: Tokenizer,
    *,
    model: str = "gpt2",
    pre: str | None = None,
    architecture: str = "llama",
    name: str = "tiny",
    fill_up_to: int = 0,
    **fields: Any,
) -> Path:
    """Write the file and return its path.

    Args:
        path: Path of the file.
        tokenizer: Tokenizer with the tokens and merges.
        model: The tokenizer's type; with `llama`, tokens have scores by their merges' ranks.
        pre: The pre-tokenizer's name, if it has one.
        architecture: Architecture that the file names.
        name: Name of the model.
        fill_up_to: Number of tokens including unused ones.
        fields: More fields of `tokenizer.ggml`: token ids, flags or texts.
    """
    content = json.loads(tokenizer.to_str())
    texts = {token: text for text, token in content["model"]["vocab"].items()}
    added = {token["id"]: token for token in content["added_tokens"]}
    texts |= {token: entry["content"] for token, entry in added.items()}
    merges = [tuple(merge) for merge in content["model"]["merges"]]
    ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(merges)))}
    tokens, types, scores = [], [], []
    for token in range(max(*texts, fill_up_to - 1) + 1):
        text = texts.get(token, f"[PAD{token}]")
        if token not in texts:
            kind = gguf.TokenType.UNUSED
        elif token in added:
            looks_special = text.startswith(("<|", "<\uff5c"))
            special = added[token]["special"] or looks_special
            kind = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
            text = text if special else text.replace(SPACE, " ")
        elif model == "llama" and BYTE.fullmatch(text):
            kind = gguf.TokenType.BYTE
        else:
            kind = gguf.TokenType.NORMAL
        tokens.append(text)
        types.append(kind)
        scores.append(-float(ranks.get(text, 1_000_000)))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if model == "llama":
        writer.add_token_scores(scores)
    else:
        writer.add_token_merges([" ".join(merge) for merge in merges])
    for key, value in fields.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
