"""A model's step as one piece of a simulated GPU's work."""

from dataclasses import replace

import torch
from torch.utils._pytree import tree_map_only

from octavo.engine.attention.operator import attending, current_step
from tests.engine.execution.lazy_gpu import GPU


class QueuedForward:
    """A model's step as one piece of the GPU's work."""

    def __init__(self, gpu, forward, vocab_size):
        self._gpu, self._forward, self._vocab_size = gpu, forward, vocab_size

    def __call__(self, token_ids, positions, logit_rows):
        gpu, step = self._gpu, current_step()
        logits = torch.empty((len(logit_rows), self._vocab_size), device=GPU)
        given = [gpu.alias(each) for each in (token_ids, positions, logit_rows)]
        groups = [
            replace(
                group,
                plan=None,
                **{
                    name: gpu.alias(getattr(group, name))
                    for name in ("query_starts", "seq_lens", "block_tables", "slot_mapping")
                },
            )
            for group in step.groups
        ]
        layers = [tree_map_only(torch.Tensor, gpu.alias, layer) for layer in step.layers]
        into, on_host = gpu.alias(logits), replace(step, groups=groups, layers=layers)

        def work():
            with torch.inference_mode(), attending(on_host):
                into.copy_(self._forward(*given))

        gpu.launch(work)
        return logits
