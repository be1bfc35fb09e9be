"""Turns a router's Submit into a request, or says what is wrong with it.

Ranges of the sampling parameters are the contract's and are checked by
`octavo.common.limits`, for the router as for the engine; here stands what only
the engine knows: its model's size and its memory.
"""

import time
from dataclasses import dataclass

from engine.request import Request, SamplingParams
from octavo.common.rpc import invalid, unimplemented
from octavo.v1 import engine_pb2, sampling_pb2


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests must fit in.

    Attributes:
        vocab_size: token ids are below this.
        max_model_len: most tokens of prompt and output.
        max_outputs: most outputs of one request.
        num_blocks: all KV-cache blocks.
        block_size: tokens in each.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    vocab_size: int
    max_model_len: int
    max_outputs: int
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]

    def blocks_for_outputs(self, prompt_tokens: int, output_tokens: int, n: int) -> int:
        """Most blocks a request can come to hold: its prompt's, shared, and each output's own."""
        if n == 1:
            return -(-(prompt_tokens + output_tokens) // self.block_size)
        own = -(-output_tokens // self.block_size) + 1
        return -(-prompt_tokens // self.block_size) + n * own


def to_request(submit: engine_pb2.Submit, session: int, limits: Limits) -> Request:
    """Checks a Submit and translates it.

    Raises:
        RpcError: it cannot be served by this engine, ever.
    """
    if submit.HasField("beam"):
        raise unimplemented("beam", "this engine does not do beam search")
    prompt = tuple(submit.prompt_token_ids)
    sampling = _sampling(submit.sampling, submit.output)
    max_tokens = _check_lengths(prompt, submit.stop, sampling.n, limits)
    stop = submit.stop
    now = time.monotonic()
    timeout = submit.timeout.ToTimedelta().total_seconds() if submit.HasField("timeout") else None
    return Request(
        session=session,
        request_id=submit.request_id,
        prompt=prompt,
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=stop.min_tokens,
        eos_token_ids=frozenset() if stop.ignore_eos else frozenset(limits.eos_token_ids),
        stop_token_ids=frozenset(stop.token_ids),
        priority=submit.priority,
        arrival=now,
        deadline=None if timeout is None else now + timeout,
    )


def _check_lengths(
    prompt: tuple[int, ...], stop: sampling_pb2.StopConditions, n: int, limits: Limits
) -> int:
    """Checks that prompt and outputs fit; gives the most tokens of an output."""
    if not prompt:
        raise invalid("prompt", "the prompt has no tokens; at least 1 is needed")
    if max(prompt) >= limits.vocab_size:
        raise invalid("prompt", f"token id {max(prompt)} is outside [0, {limits.vocab_size - 1}]")
    if not 1 <= n <= limits.max_outputs:
        raise invalid("sampling.n", f"n is {n}, outside [1, {limits.max_outputs}]")
    room = limits.max_model_len - len(prompt)
    if room < 1:
        raise invalid(
            "prompt",
            f"the prompt has {len(prompt)} tokens; at most {limits.max_model_len - 1} fit"
            f" beside one of output",
        )
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else room
    if not 1 <= max_tokens <= room:
        raise invalid(
            "stop.max_tokens",
            f"max_tokens is {max_tokens}, outside [1, {room}]: {len(prompt)} tokens of prompt"
            f" leave that much of {limits.max_model_len}",
        )
    needed = limits.blocks_for_outputs(len(prompt), max_tokens, n)
    if needed > limits.num_blocks:
        raise invalid(
            "sampling.n" if n > 1 else "prompt",
            f"{len(prompt)} tokens of prompt and {n} x {max_tokens} of output can come to need"
            f" {needed} KV-cache blocks; the engine has {limits.num_blocks}",
        )
    return max_tokens


def _sampling(
    params: sampling_pb2.SamplingParams, output: sampling_pb2.OutputOptions
) -> SamplingParams:
    """Translates parameters whose ranges were checked, filling in defaults."""
    greedy = params.HasField("temperature") and params.temperature == 0
    return SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        top_k=0 if greedy else params.top_k,
        min_p=params.min_p,
        repetition_penalty=(
            params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
        ),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed,
        n=params.n if params.HasField("n") else 1,
        logit_bias=dict(params.logit_bias),
        logprobs=output.logprobs if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
    )
