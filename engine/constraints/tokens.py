"""Loads the texts of the model's tokens for grammars."""

from collections.abc import Sequence
from pathlib import Path

from octavo.common.models.errors import ModelError
from octavo.common.models.tokenizer import load_tokenizer
from octavo.engine.constraints.token_table import TokenTable


def read_tokens(model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> TokenTable:
    """Return the tokens of a model's directory.

    Args:
        model: The model's directory.
        vocab_size: The model's number of tokens; a tokenizer may lack some of them.
        eos_token_ids: The tokens that end an output.

    Raises:
        ModelError: The tokenizer cannot be read, or grammars do not support its type.
        OSError: A file cannot be read.
    """
    # Imported here because an engine starts without it if its model was compiled before.
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    try:
        tokenizer = load_tokenizer(model)
    except (ModelError, OSError):
        raise
    except Exception as error:  # transformers raises many types
        raise ModelError(f"the tokenizer of {model} cannot be loaded: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(f"the tokenizer {type(tokenizer).__name__} has no fast version")
    size = max(vocab_size, len(tokenizer))
    return TokenTable(tokenizer.backend_tokenizer.to_str(), size, tuple(eos_token_ids))
