"""Each rank holds its share of the weights: at most 1.1 of an even one."""

import pytest
from transformers import LlamaConfig, MixtralConfig

from tests.engine.parallel.harness import run_ranks, start_ranks
from tests.engine.random_model import save_random_model

SIZES = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {"llama": LlamaConfig(**SIZES), "mixtral": MixtralConfig(**SIZES | EXPERTS)}
WHOLE = {"expert_parallel": True}
SHARE = 1.1
GROWTH = 32 << 20


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "size", "stages", "settings"),
    [
        ("mixtral", 4, 2, WHOLE),
        ("llama", 2, 1, {}),
        ("llama", 2, 2, {}),
        ("llama", 4, 4, {}),
        ("mixtral", 2, 1, WHOLE),
        ("mixtral", 4, 1, {}),
    ],
)
def test_no_rank_holds_more_than_its_share(family, size, stages, settings, tmp_path):
    save_random_model(MODELS[family], tmp_path / family, std=0.1)
    given = {"model": str(tmp_path / family), "work": "scored", "settings": settings}
    alone = given | {"settings": {}}
    _, (one,) = start_ranks(1, {family: alone}, tmp_path)
    codes, found = start_ranks(size, {family: given | {"stages": stages}}, tmp_path)
    assert codes == [0] * size, found
    held = [of_rank[family]["weight_bytes"] for of_rank in found]
    assert max(held) <= SHARE * one[family]["weight_bytes"] / size
    assert sum(held) >= one[family]["weight_bytes"]


@pytest.mark.slow
def test_ranks_that_sum_through_sockets_do_not_grow(tmp_path):
    config = LlamaConfig(**SIZES | {"hidden_size": 256, "num_hidden_layers": 24})
    save_random_model(config, tmp_path / "deep", std=0.02)
    rounds = 12
    case = {"work": " ".join(["mixed"] * rounds), "sockets": True, "settings": {"compile": "auto"}}
    found = run_ranks(2, {"deep": case | {"model": str(tmp_path / "deep")}}, tmp_path)["deep"]
    assert found["compiled"]
    assert found["resident"][-1] < found["resident"][0] + GROWTH
