"""Adapters of all adaptable layers, in families whose layers differ from Llama's."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.architectures.entries import entries
from tests.architectures.serve import save
from tests.engine.lora.test_outputs import prompt_of
from tests.engine.stepper import Stepper
from tests.peft_adapters import merged, save_adapter

BY_NAME = {entry.name: entry for entry in entries()}
QUICK = {
    "deepseek_v3": {"kv_b_proj", "gate"},  # latents, experts
    "gpt2": set(),  # Conv1D, with queries, keys and values in one
}
SLOW = {
    "bloom": set(),
    "falcon_h1": set(),
    "gemma3n_text": set(),
    "jamba": set(),
    "mixtral": {"gate"},
    "phi3": set(),
    "qwen3_next": set(),
}
MLP = {"gate_proj", "up_proj", "down_proj"}
NOT_BY_PEFT = {"deepseek_v3": MLP, "falcon_h1": {"out_proj"}, "qwen3_next": MLP}
"""Layers that peft does not adapt: it mistakes an MLP's names for the experts."""
FAMILIES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
LENGTH = 40


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_the_merged_model(family, tmp_path):
    base, path = tmp_path / "base", tmp_path / "adapter"
    save(BY_NAME[family], base)
    settings = {"dtype": "float32", "compile": "off", "swap_space": 0.0, "num_blocks": 200}
    engine = Stepper(build(EngineSettings(model=str(base), enable_lora=True, **settings)))
    registry = engine.parts.adapters
    layers = sorted(name for name in registry._targets.layers if "lm_head" not in name)
    layers = [name for name in layers if name.split(".")[-1] not in NOT_BY_PEFT.get(family, ())]
    assert layers
    assert {name.split(".")[-1] for name in layers}.isdisjoint((QUICK | SLOW)[family])
    save_adapter(base, path, r=5, target_modules=layers, std=0.1)
    registry.add(registry.read("mine", path))
    prompt = [token % 90 + 3 for token in prompt_of(4, LENGTH)]
    group, plain = (
        engine.submit(prompt, 1, prompt_logprobs=0, adapter=adapter)
        for adapter in (registry.find("mine"), None)
    )
    engine.run()
    models = merged(base, path), AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    seen = [torch.tensor([s.logprob for s in own.prompt_logprobs]) for own in (group, plain)]
    for model, found in zip(models, seen, strict=True):
        with torch.inference_mode():
            truth = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
        exact = truth[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        torch.testing.assert_close(found, exact, atol=2e-3, rtol=2e-3)
    assert (seen[0] - seen[1]).abs().max() > 0.05  # the adapter does something
