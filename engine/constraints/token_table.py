"""The texts of a model's tokens."""

from dataclasses import dataclass

from llguidance import LLTokenizer

from octavo.engine.constraints.markers import hide_markers


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The texts of a model's tokens.

    Attributes:
        json: The tokenizer as the text of a tokenizer.json.
        size: Number of tokens, including those without text.
        eos_token_ids: The tokens that end an output.
    """

    json: str
    size: int
    eos_token_ids: tuple[int, ...]

    def build(self) -> LLTokenizer:
        """Return the table in llguidance's form; this takes about a second.

        Pass its grammars through `hide_references` of `markers.py`.
        """
        tokenizer = hide_markers(self.json, self.eos_token_ids)
        return LLTokenizer(tokenizer, n_vocab=self.size, eos_token=list(self.eos_token_ids))
