"""Whether a checkpoint has every weight that its model needs."""

from typing import Any

from transformers import AutoModelForCausalLM

from octavo.common.models import ModelError


def check_weights(path: str) -> None:
    """Refuses a model of which weights are missing or misshapen.

    transformers would draw these at random, and the model talk nonsense. It is asked for the
    model without memory for its weights, which are not read for that. Tied weights, of which
    one is enough, are its business, and what weights are called in checkpoints of all ages.

    Args:
        path: a directory or a hub name.

    Raises:
        ModelError: the message says what is wrong with how many weights, and names one.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, device_map="meta", ignore_mismatched_sizes=True, output_loading_info=True
        )
    except Exception:  # noqa: BLE001 - loading it for good fails too, and says why
        return
    _, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"{path} lacks {len(missing)} of the model's weights, as {missing[0]}")
    if misshapen := sorted(found["mismatched_keys"]):
        name, held, needed = misshapen[0]
        raise ModelError(
            f"{path} has {len(misshapen)} of the model's weights in another shape, as {name}:"
            f" {list(held)} in place of {list(needed)}"
        )
