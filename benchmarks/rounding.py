"""Which outputs hang on rounding.

A step's shape decides in which order float32 sums are taken, so the last bits of
its logits differ with the company a sequence has. Nearly never does a token
hang on them: where two logits all but tie, or a draw falls on the very edge
between two tokens. Outputs that do are no measure of anything else.
"""

import json
from dataclasses import fields
from functools import cached_property
from pathlib import Path

import torch
from llguidance import LLMatcher, LLTokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo import Completion, Output
from octavo.client.requests import GenerateOptions
from octavo.common.sampling_parameters import SamplingParams
from octavo.engine.constraints.constraint import Constraint, ConstraintKind
from octavo.engine.constraints.grammar import compile_grammar
from octavo.engine.constraints.matcher import WORD_BITS, EndRule, Matcher
from octavo.engine.constraints.tokens import read_tokens
from octavo.engine.sampling.sampler import SamplingRow, sample
from octavo.engine.scheduling.request import Request
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup

NOISE = 2e-5
"""Standard deviation of what is added to logits: some ten times what rounding does to them."""
COPIES = 32
"""How often each token is chosen anew."""


class Judge:
    """Chooses every token of an output again, many times, from slightly other logits.

    Args:
        model: Directory of the model, as saved by transformers.
    """

    def __init__(self, model: str) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32
        ).eval()
        self._directory = Path(model)
        self._grammars: dict[str, LLMatcher] = {}
        self._generator = torch.Generator().manual_seed(0)

    def is_decided(
        self, prompt: list[int], options: GenerateOptions, completion: Completion
    ) -> bool:
        """Whether all choices of a request come out the same each time.

        Beam searches count as decided: their scores are sums over whole outputs.

        Args:
            prompt: Token ids.
            options: What was asked.
            completion: What came of it, with token ids.
        """
        if "beam_width" in options:
            return True
        names = {field.name for field in fields(SamplingParams)} & options.keys()
        params = SamplingParams(**{name: options[name] for name in names})  # type: ignore[literal-required]
        return all(
            self._is_decided(prompt, params, output, self._matchers(options, output))
            for output in completion.outputs
        )

    def _matchers(self, options: GenerateOptions, output: Output) -> list[Matcher | None]:
        """Return an output's place in its JSON Schema, if it has one, before each of its tokens."""
        if "json_schema" not in options:
            return [None] * len(output.token_ids)
        schema = json.dumps(options["json_schema"])
        if schema not in self._grammars:
            constraint = Constraint(ConstraintKind.JSON_SCHEMA, (schema,))
            self._grammars[schema] = compile_grammar(constraint, self._tokens)
        words = -(-self._tokens.vocab_size // WORD_BITS)
        matcher = Matcher(self._grammars[schema].deep_copy(), words, EndRule())
        places: list[Matcher | None] = []
        for before in ([], *([token_id] for token_id in output.token_ids[:-1])):
            matcher.advance(before)
            places.append(matcher.copy())
        return places

    @cached_property
    def _tokens(self) -> LLTokenizer:
        config = self._model.config
        return read_tokens(self._directory, config.vocab_size, [config.eos_token_id]).build()

    @torch.inference_mode()
    def _is_decided(
        self,
        prompt: list[int],
        params: SamplingParams,
        found: Output,
        matchers: list[Matcher | None],
    ) -> bool:
        output = list(found.token_ids)
        tokens = prompt + output
        logits = self._model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
        logits = logits.repeat_interleave(COPIES, dim=0)
        logits += NOISE * torch.randn(logits.shape, generator=self._generator)
        request = Request(0, "", tuple(prompt), params, len(output), 0.0)
        rows: list[SamplingRow] = []
        for place, matcher in zip(range(len(prompt), len(tokens)), matchers, strict=True):
            sequence = Sequence(0, found.index, tokens[:place], len(prompt), matcher=matcher)
            group = SequenceGroup(request, [sequence])
            rows += [SamplingRow(group, sequence, len(rows) + i) for i in range(COPIES)]
        chosen = torch.tensor([token.token_id for token in sample(logits, rows).collect()[1]])
        return bool((chosen.view(-1, COPIES) == torch.tensor(output)[:, None]).all())
