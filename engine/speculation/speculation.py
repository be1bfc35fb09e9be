"""Decides for each sequence whether to draft, and how many tokens."""

from octavo.engine.speculation.history import History
from octavo.engine.speculation.method import NO_GUESS, DraftState, Guess, Method
from octavo.engine.speculation.policy import DraftPolicy


class Speculation:
    """A draft method, and the rule for when to use it.

    Attributes:
        num_tokens: Maximum tokens of a draft.
    """

    def __init__(
        self, method: Method | None, num_tokens: int, policy: DraftPolicy | None = None
    ) -> None:
        """Set up for all sequences of an engine.

        Args:
            method: The draft method; None for a draft model.
            num_tokens: Maximum tokens of a draft.
            policy: The policy that decides where drafts pay; None: use all of the method's drafts.
        """
        self.num_tokens = num_tokens
        self._method = method
        self._policy = policy

    def begin_step(self, decodes: int) -> bool:
        """Return whether any draft can pay in a step of `decodes` decoding sequences."""
        return self._policy is None or self._policy.begin_step(decodes)

    def begin(self, num_prompt: int, salt: str) -> DraftState:
        """Return the draft state of a new sequence, whose prompt has `num_prompt` tokens.

        Only sequences with the same `salt` get drafts from its output.
        """
        if self._policy is None:
            return DraftState(History(num_prompt, salt), 1.0)
        return self._policy.begin(History(num_prompt, salt))

    def guess(self, state: DraftState, token_ids: list[int], most: int) -> Guess:
        """Return likely next tokens of a sequence, and the number of drafted tokens that may pay.

        Args:
            state: The sequence's drafting state.
            token_ids: Its prompt and output, all known.
            most: Maximum tokens to draft.
        """
        most = min(most, self.num_tokens)
        if self._policy is not None:
            most = min(most, self._policy.length(state))
        if most < 1:
            return NO_GUESS
        if self._method is None:
            return Guess((), most)
        state.history.update(token_ids)
        draft = self._method.draft(state.history, most)
        if self._policy is not None and state.history.alignment.drafted:
            draft = draft[: self._policy.aligned_length(state)]
        return Guess(draft, most)

    def begin_draft(self, count: int) -> None:
        """Record that a sequence has `count` drafted tokens in this step."""
        if self._policy is not None:
            self._policy.drafted(count)

    def wants(self, state: DraftState | None) -> bool:
        """Return whether a sequence may have a draft in the step after next; `begin_step` first."""
        return self._policy is None or state is None or state.pause <= 1

    def end_draft(self, state: DraftState, drafted: int, accepted: int) -> None:
        """Record the number of right drafted tokens of a sequence."""
        if self._policy is not None:
            self._policy.observe_draft(state, drafted, accepted)

    def end(self, state: DraftState, token_ids: list[int]) -> None:
        """Learn from an output that ended; `token_ids` has no placeholders."""
        if self._method is not None:
            state.history.update(token_ids)
            self._method.learn(state.history)

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Record the duration of a step that computed `tokens` tokens, without a prefill."""
        if self._policy is not None:
            self._policy.observe_step(tokens, seconds)
