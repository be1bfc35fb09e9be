"""Translate a GenerateRequest of vLLM's contract to a Submit, or name what it cannot have.

A field that vLLM's messages cannot leave unset (`top_p` 0) has vLLM's default, which is Octavo's.
The gateway owns text: `original_text` and the fields of detokenization are not read. Only stop
strings are looked for in the engine, as vLLM does (`stop_strings.py`).
"""

from collections.abc import Mapping

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb2

from octavo.common import rpc
from octavo.common.limits import Limits, check_number
from octavo.v1 import engine_pb2, sampling_pb2

NOT_SERVED = {
    "mm_inputs": "images and videos",
    "extra_mm_inputs": "images and videos",
    "media_refs": "images and videos",
    "kv_transfer_params": "the transfer of K/V between engines",
    "kv_transfer_params_json": "the transfer of K/V between engines",
}
"""Fields of GenerateRequest that the engine does not support, with their purpose."""
UNSIGNED = (1 << 64) - 1
MAX_GRAMMAR = 1 << 15
"""Maximum characters of a grammar. Rewriting GBNF takes time quadratic in its rules."""


def to_submit(
    request: vllm_pb2.GenerateRequest, limits: Limits, trace_context: Mapping[str, str]
) -> engine_pb2.Submit:
    """Translate a request. A grammar stays in its own notation; see `ConstraintKind.EBNF`.

    Args:
        request: The message.
        limits: The engine's limits: `max_tokens` beyond the context is the context's end, as in
            vLLM.
        trace_context: The caller's trace.

    Raises:
        RpcError: UNIMPLEMENTED or INVALID_ARGUMENT with the field.
    """
    _check_served(request)
    params, prompt = request.sampling_params, request.tokenized.input_ids
    stop = sampling_pb2.StopConditions(
        min_tokens=params.min_tokens,
        strings=params.stop,
        token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )
    if params.HasField("max_tokens") and params.max_tokens <= limits.max_model_len - len(prompt):
        stop.max_tokens = params.max_tokens
    return engine_pb2.Submit(
        request_id=request.request_id,
        prompt_token_ids=prompt,
        sampling=_sampling(params),
        stop=stop,
        output=sampling_pb2.OutputOptions(
            logprobs=_logprobs(params, "logprobs"),
            prompt_logprobs=_logprobs(params, "prompt_logprobs"),
        ),
        constraint=_constraint(params),
        trace_context=trace_context,
    )


def _check_served(request: vllm_pb2.GenerateRequest) -> None:
    """Refuse fields that the engine does not support.

    Raises:
        RpcError: UNIMPLEMENTED or INVALID_ARGUMENT with the field.
    """
    set_fields = {field.name for field, _ in request.ListFields()}
    for name, what in NOT_SERVED.items():
        if name in set_fields:
            raise rpc.unimplemented(name, f"{name} must not be set: this engine lacks {what}")
    if request.HasField("text"):
        raise rpc.unimplemented("text", "text must be tokens: set tokenized.input_ids")
    if request.data_parallel_rank:
        raise rpc.invalid(
            "data_parallel_rank",
            f"data_parallel_rank must be 0, the only one; got {request.data_parallel_rank}",
        )
    params = request.sampling_params
    if params.HasField("truncate_prompt_tokens"):
        raise rpc.unimplemented(
            "sampling_params.truncate_prompt_tokens",
            "sampling_params.truncate_prompt_tokens must not be set: cut tokenized.input_ids",
        )


def _sampling(params: vllm_pb2.SamplingParams) -> sampling_pb2.SamplingParams:
    """Translate how tokens are sampled.

    Raises:
        RpcError: INVALID_ARGUMENT: a token id in `logit_bias` is negative.
    """
    for token_id in params.logit_bias:
        check_number("sampling_params.logit_bias", token_id, 0, UNSIGNED >> 32)
    return sampling_pb2.SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or None,
        top_k=params.top_k or None,
        min_p=params.min_p or None,
        repetition_penalty=params.repetition_penalty or None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed & UNSIGNED if params.HasField("seed") else None,
        n=params.n or None,
        logit_bias=params.logit_bias,
    )


def _logprobs(params: vllm_pb2.SamplingParams, name: str) -> int | None:
    """Return the number of requested log-probabilities; None if not requested.

    Raises:
        RpcError: INVALID_ARGUMENT: the number is negative; vLLM's -1 means all.
    """
    if not params.HasField(name):
        return None
    count: int = getattr(params, name)
    if count < 0:
        raise rpc.invalid(
            f"sampling_params.{name}", f"sampling_params.{name} must be 0 or more; got {count}"
        )
    return count


def _constraint(params: vllm_pb2.SamplingParams) -> sampling_pb2.OutputConstraint | None:
    """Translate the output constraint; None without one.

    Raises:
        RpcError: UNIMPLEMENTED or INVALID_ARGUMENT with the field.
    """
    kind = params.WhichOneof("constraint")
    match kind:
        case None:
            return None
        case "structural_tag":
            raise rpc.unimplemented(
                "sampling_params.structural_tag",
                "sampling_params.structural_tag is not served: use json_schema, regex or grammar",
            )
        case "choice":
            choices = sampling_pb2.Choices(values=params.choice.choices)
            return sampling_pb2.OutputConstraint(choices=choices)
        case "grammar" if len(params.grammar) > MAX_GRAMMAR:
            raise rpc.invalid(
                "sampling_params.grammar",
                f"sampling_params.grammar must have at most {MAX_GRAMMAR} characters; "
                f"it has {len(params.grammar)}",
            )
        case _:
            return sampling_pb2.OutputConstraint(**{kind: getattr(params, kind)})
