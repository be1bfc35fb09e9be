"""Arguments that are accepted only with values that change nothing.

OpenAI's clients and vLLM's users send many of them with their default. Other values are rejected,
not ignored: a response that ignored `use_beam_search` would be wrong. The same holds for other
servers' names of a grammar.
"""

import json
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from octavo.router.http.errors import UNSUPPORTED

Harmless = dict[str, tuple[object, ...]]
"""The accepted values of each argument, besides null."""


def only(*harmless: object) -> AfterValidator:
    """Reject every value of an argument but null and `harmless`."""
    accepted = " or ".join(json.dumps(value) for value in harmless if value or value is False)
    message = f"is supported only as {accepted}" if accepted else "is not supported"

    def check(value: object) -> object:
        if value is not None and value not in harmless:
            raise PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})
        return value

    return AfterValidator(check)


Never: TypeAlias = Annotated[Any, only()]

BOTH: Harmless = {
    "detokenize": (True,),
    "ebnf": (),
    "ec_transfer_params": (),
    "grammar": (),
    "guided_decoding_backend": ("auto", "guidance"),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "regex": (),
    "repetition_detection": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structural_tag": (),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
SINGLE_OUTPUT: Harmless = {"prompt_logprobs": (), "return_token_ids": (False,)}
"""Arguments of the completions APIs alone."""
LAYOUT: Harmless = {
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
"""Arguments of a chat's layout, in /v1/chat/completions and /tokenize."""
CHAT: Harmless = {
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": (),
    "web_search_options": (),
}
COMPLETION: Harmless = {
    "add_special_tokens": (True,),
    "messages": (),
    "prompt_embeds": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
TEXTS: Harmless = {
    "add_special_tokens": (True,),
    "dtype": ("float32",),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "messages": (),
    "truncation_direction": ("right", "Right"),
    "truncation_side": ("right",),
}


def members(arguments: Harmless) -> dict[str, Any]:
    """Return arguments as fields for pydantic's `create_model`."""
    return {name: (Annotated[Any, only(*values)], None) for name, values in arguments.items()}
