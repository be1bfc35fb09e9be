"""Prompts of models that fill in the middle: a text before the output, and one after it."""

from collections.abc import Mapping, Sequence

from octavo.common import rpc

FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek
)
"""Models' tokens before the text before the output, before the text after it, and at the end."""


def fill_in_middle(
    vocabulary: Mapping[str, int], before: Sequence[int], after: Sequence[int]
) -> list[int]:
    """Return the tokens of a prompt whose output is the text between two texts.

    Args:
        vocabulary: Ids of the model's tokens.
        before: Tokens of the text before the output.
        after: Tokens of the text after it.

    Raises:
        rpc.RpcError: UNIMPLEMENTED: the vocabulary has no tokens for that.
    """
    for names in FORMS:
        if all(name in vocabulary for name in names):
            prefix, suffix, middle = (vocabulary[name] for name in names)
            return [prefix, *before, suffix, *after, middle]
    raise rpc.unimplemented(
        "suffix", "suffix is not supported by this model: it has no tokens to fill in the middle"
    )
