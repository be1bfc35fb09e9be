"""Keeps control tokens out of text: ordinary tokens spell a grammar's text.

llguidance never matches text with a control token. But the tokenizer spells the text that a grammar
forces, and would turn `<|im_end|>` in it into the token. So llguidance gets a tokenizer with random
names for control tokens, which no text contains.
"""

import json
import re
import secrets
from collections.abc import Collection
from typing import Any

SECRET = secrets.token_hex(8)
"""Random part of the control tokens' names; every process has its own."""
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""Pattern of one-byte tokens, in tokenizers with byte fallback."""
_REFERENCES = re.compile(
    r'"(?:\\.|[^"\\])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|(?P<name><(?!\[)[^<>\s]+>)', re.DOTALL
)
"""Pattern of strings, comments and regular expressions of a Lark grammar, where names mean nothing;
or of a token's name."""


def hide_markers(tokenizer: str, eos_token_ids: Collection[int]) -> str:
    """Return a tokenizer that turns no text into a control token.

    Control tokens are special tokens, tokens in angle brackets (as in llguidance), and tokens that
    end an output. Other added tokens are text.

    Args:
        tokenizer: Text of a tokenizer.json.
        eos_token_ids: The tokens that end an output.
    """
    data = json.loads(tokenizer)
    model = data["model"]
    names, added = {}, []
    known = _pieces(model["vocab"])
    for token in data["added_tokens"]:
        content = token["content"]
        is_byte = bool(model.get("byte_fallback")) and _BYTE.fullmatch(content) is not None
        is_control = token["special"] or (content[:1] == "<" and content[-1:] == ">")
        if not is_byte and (is_control or token["id"] in eos_token_ids):
            names[content] = hidden(content)
        elif content in known:
            continue  # an ordinary token, which the tokenizer's model spells
        elif not content.isascii():
            names[content] = hidden(content)  # decoders read its characters as bytes, or as spaces
        added.append(
            {
                **token,
                "content": names.get(content, content),
                "special": content in names,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        )
    data["added_tokens"] = added
    data["post_processor"] = None  # it names control tokens, which text does not need
    _rename(model, names)
    return json.dumps(data, ensure_ascii=False)


def hidden(name: str) -> str:
    """Return a control token's name in the tokenizer that llguidance gets."""
    return f"<{SECRET}{name[1:]}" if name.startswith("<") else f"{SECRET}{name}"


def hide_references(grammar: str) -> str:
    """Return a Lark grammar with the tokenizer's names of control tokens."""
    return _REFERENCES.sub(lambda one: hidden(one[0]) if one["name"] else one[0], grammar)


def shown(message: str) -> str:
    """Return a message with the control tokens' original names."""
    return message.replace(SECRET, "")


def _pieces(vocabulary: dict[str, int] | list[list[Any]]) -> Collection[str]:
    """Return the pieces of a vocabulary: by name, or in a list with their scores."""
    return vocabulary if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename pieces of a tokenizer's model, and drop the merges that form them."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [one for one in model["merges"] if not _makes(one, names)]


def _makes(merge: str | list[str], names: dict[str, str]) -> bool:
    """Return whether a merge forms one of the pieces, or joins one of them."""
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first in names or second in names or first + second in names
