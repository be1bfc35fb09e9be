"""The texts of a model's tokens."""

from dataclasses import dataclass

from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The texts of a model's tokens.

    Attributes:
        json: The tokenizer, as a tokenizer.json has it.
        size: Number of tokens, those without a text included.
        eos_token_ids: The tokens that end an output.
    """

    json: str
    size: int
    eos_token_ids: tuple[int, ...]

    def build(self) -> LLTokenizer:
        """Return the table as llguidance uses it; it takes about a second."""
        return LLTokenizer(self.json, n_vocab=self.size, eos_token=list(self.eos_token_ids))
