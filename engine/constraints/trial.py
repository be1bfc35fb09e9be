"""Compiles a constraint and follows some tokens through it, to measure its cost."""

import random
import signal
import time

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from octavo.engine.constraints.constraint import Constraint, ConstraintError
from octavo.engine.constraints.grammar import compile_grammar, schemas, shorten
from octavo.engine.constraints.json_schema import locate, unenforceable

TRIAL_TOKENS = 48
MAX_MASK_SECONDS = 0.1
"""Maximum seconds of a mask in a trial. Freeing a slower one's results takes milliseconds, during
which no other thread gets Python's lock."""


def try_constraint(
    constraint: Constraint, tokens: LLTokenizer, *, in_sandbox: bool = False
) -> None:
    """Compile a constraint and sample some random tokens under it.

    Args:
        constraint: The constraint.
        tokens: The model's tokens.
        in_sandbox: Whether SIGVTALRM may end the process if a mask takes too long.

    Raises:
        ConstraintError: It is not valid or not supported, or exceeds a limit.
    """
    matcher = _compile(constraint, tokens)
    draw = random.Random(0)  # noqa: S311 - the same trial every time
    mask = np.empty((tokens.vocab_size + 31) // 32, np.int32)
    for length in range(TRIAL_TOKENS):
        began = time.process_time()
        if in_sandbox:
            signal.setitimer(signal.ITIMER_VIRTUAL, MAX_MASK_SECONDS)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        seconds = time.process_time() - began
        _check(matcher, length)
        if seconds > MAX_MASK_SECONDS:
            raise ConstraintError(
                f"the tokens that may follow the first {length} took {seconds:.2f} s to find; at "
                f"most {MAX_MASK_SECONDS} s are allowed: make it simpler"
            )
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not allowed.size:
            raise ConstraintError(f"no token of the model can follow the first {length}")
        token_id = int(allowed[draw.randrange(allowed.size)])
        if token_id in tokens.eos_tokens:
            return
        matcher.consume_token(token_id)
        _check(matcher, length + 1)


def _compile(constraint: Constraint, tokens: LLTokenizer) -> LLMatcher:
    """Compile a constraint; an error names the wrong place of a schema."""
    embedded = schemas(constraint)
    for schema in embedded:
        if (why := unenforceable(schema)) is not None:
            raise ConstraintError(why)
    try:
        return compile_grammar(constraint, tokens)
    except ConstraintError as error:
        message = str(error)
        for schema in embedded:
            message = locate(schema, message)
        raise ConstraintError(message) from None


def _check(matcher: LLMatcher, length: int) -> None:
    if matcher.is_error():
        raise ConstraintError(f"after {length} tokens: {shorten(matcher.get_error())}")
