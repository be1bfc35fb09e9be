"""How the tokens of a request are sampled."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample tokens: the parameters of the messages `sampling` and `output`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] = field(default_factory=list)
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def takes_greatest(self) -> bool:
        """Whether the result is the token of the highest logit, without log-probabilities."""
        return self.greedy and self.logprobs is None and not self.moves_logits

    @property
    def moves_logits(self) -> bool:
        """Whether penalties, a bias or a list of tokens change the logits."""
        return self.penalised or bool(self.logit_bias) or bool(self.allowed_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is selected, without sampling."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens affect the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
