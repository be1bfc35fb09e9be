"""Adapters' outputs against peft's merged models in float32."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.engine.execution.cuda_graphs import StepGraphs
from octavo.engine.execution.graph_sizes import MOST_RANK, step_sizes
from octavo.engine.models import load_model
from octavo.engine.scheduling.request import BeamSearch
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.engine.execution.recording import Again
from tests.engine.lora.conftest import CONFIGS
from tests.engine.stepper import Stepper
from tests.peft_adapters import greedy, merged


@pytest.fixture(scope="module")
def make_engine(decided_model, adapter_paths):
    """Return a function that makes an engine with all adapters, in float32."""

    def make(**settings):
        lora = [f"{name}={path}" for name, path in adapter_paths.items()]
        given = {"dtype": "float32", "compile": "off", "swap_space": 0.05, "lora": lora} | settings
        return Stepper(build(EngineSettings(model=str(decided_model), **given)))

    return make


@pytest.fixture(scope="module")
def references(decided_model, adapter_paths):
    return {name: merged(decided_model, path) for name, path in adapter_paths.items()}


@pytest.fixture(scope="module")
def expected(decided_model, references):
    """Return a function that generates with transformers' merged model, or with the base."""
    models = references | {None: AutoModelForCausalLM.from_pretrained(decided_model).eval()}
    known = {}

    def generate(name, prompt, count):
        if (name, prompt) not in known:
            known[name, prompt] = greedy(models[name], list(prompt), count)
        return known[name, prompt]

    return generate


def prompt_of(seed, length):
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def own_tokens(group, index=0):
    return group.sequences[index].token_ids[len(group.request.prompt) :]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_batch_of_all_adapters_and_none_is_that_of_merged_models(
    make_engine, expected, preemption
):
    engine = make_engine(num_blocks=96, block_size=8, preemption=preemption)
    names = [*CONFIGS, None] * 4
    groups = []
    for seed, name in enumerate(names[:32]):
        prompt = prompt_of(seed % 7, 20 + seed % 11)  # each prompt uses several adapters
        groups.append((name, engine.submit(prompt, 10, adapter=engine.adapter(name))))
    engine.run()
    counters = engine.scheduler.counters
    assert counters["preemptions_swap"] + counters["preemptions_recompute"] > 5
    assert max(len({group.request.adapter for group in b.groups}) for b in engine.batches) > 4
    for name, group in groups:
        assert own_tokens(group) == expected(name, group.request.prompt, 10), name


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Layers are not packed."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(
        load_model, "_pack", lambda *given: load_model._pack_on_gpu(given[0], *given[3:], cpu)
    )


@pytest.mark.usefixtures("as_on_a_gpu")
def test_recorded_steps_take_any_adapters_of_low_rank(make_engine, expected, monkeypatch):
    again, replayed, choose = Again(), [], StepGraphs.choose

    def note(graphs, inputs):
        size = choose(graphs, inputs)
        if inputs.adapters is not None:
            replayed.append((inputs.adapters.tokens.max_rank, size is not None))
        return size

    monkeypatch.setattr(StepGraphs, "choose", note)
    options = {"num_blocks": 400, "max_num_seqs": 12, "max_num_batched_tokens": 48}
    engine = make_engine(**options)
    engine.parts.executor.record_graphs(step_sizes(12, 0, 48), 512, again.record)
    low = [name for name in CONFIGS if name != "one-layer"]
    for names in ([*low, None], ["mlp"], ["values", None, "head"], ["all", "one-layer"], low[::-1]):
        groups = []
        for seed, name in enumerate(names):
            prompt = prompt_of(seed % 7, 9 + seed)
            groups.append((name, engine.submit(prompt, 10, adapter=engine.adapter(name))))
        engine.run()
        for name, group in groups:
            assert own_tokens(group) == expected(name, group.request.prompt, 10), name
    assert {was for rank, was in replayed if rank <= MOST_RANK} == {True}
    assert {was for rank, was in replayed if rank > MOST_RANK} == {False}


@pytest.mark.usefixtures("as_on_a_gpu")
def test_recorded_steps_with_adapters_are_measured_too(make_engine):
    executor, sizes, used = make_engine(num_blocks=8).parts.executor, step_sizes(256), [0]

    def record(work):
        used[0] += 2 + (500 if len(work()) == 256 and not used[0] else 0)  # the second shares it
        return lambda: None

    taken = executor.measure_graphs(sizes, 128, record, lambda: -used[0])
    assert taken == 500 + 2 * 2 * len(sizes)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_recorded_beams_and_what_is_sampled_beside_them_keep_their_adapters(make_engine, expected):
    engine, again = make_engine(num_blocks=400, max_num_seqs=6), Again()
    engine.parts.executor.record_graphs(step_sizes(6), 512, again.record)
    prompt = prompt_of(3, 9)
    searched = engine.submit(prompt, 10, adapter=engine.adapter("head"), beam=BeamSearch(1))
    groups = [
        (name, engine.submit(prompt, 10, adapter=engine.adapter(name), logprobs=1))
        for name in (None, "head")
    ]
    engine.run()
    assert len(again.replayed) > 5
    (hypothesis,) = searched.beam.hypotheses
    assert list(hypothesis.token_ids) == expected("head", searched.request.prompt, 10)
    for name, group in groups:
        assert own_tokens(group) == expected(name, group.request.prompt, 10), name


def test_drafts_are_verified_by_each_request_s_adapter(make_engine, expected):
    engine = make_engine(num_blocks=400, speculation="suffix")
    prompt = prompt_of(8, 6) * 5
    groups = [(name, engine.submit(prompt, 24, adapter=engine.adapter(name))) for name in CONFIGS]
    engine.run()
    counters = engine.scheduler.counters
    assert counters["drafted_tokens"] > counters["accepted_tokens"] > 0
    for name, group in groups:
        assert own_tokens(group) == expected(name, group.request.prompt, 24), name


def test_logprobs_are_those_of_merged_models(make_engine, references):
    engine = make_engine(num_blocks=400, max_num_batched_tokens=48, max_num_seqs=16)
    groups = {
        name: engine.submit(
            prompt_of(5, 70), 4, prompt_logprobs=0, logprobs=3, adapter=engine.adapter(name)
        )
        for name in CONFIGS
    }
    engine.run()
    for name, group in groups.items():
        tokens = group.sequences[0].token_ids
        with torch.inference_mode():
            logits = references[name](torch.tensor([tokens])).logits[0]
        truth = torch.log_softmax(logits.double(), -1)
        for position, seen in enumerate(group.prompt_logprobs):
            expected = truth[position, tokens[position + 1]].item()
            assert seen.logprob == pytest.approx(expected, abs=2e-4), name


def test_several_outputs_and_beams(make_engine, references):
    engine = make_engine(num_blocks=400)
    prompt = prompt_of(3, 30)
    adapter = engine.adapter("all")
    beams = engine.submit(prompt, 6, beam=BeamSearch(3), adapter=adapter)
    alone = [
        engine.submit(prompt, 6, temperature=0.8, seed=9, n=3, adapter=engine.adapter(name))
        for name in ("all", "mlp")
    ]
    engine.run()
    expected = references["all"].generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=6,
        num_beams=3,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        num_return_sequences=3,
    )
    found = [list(hypothesis.token_ids) for hypothesis in beams.beam.hypotheses]
    assert found == expected[:, len(prompt) :].tolist()
    for name, group in zip(("all", "mlp"), alone, strict=True):
        again = make_engine(num_blocks=400)
        same = again.submit(prompt, 6, temperature=0.8, seed=9, n=3, adapter=again.adapter(name))
        again.run()
        for index in range(3):
            assert own_tokens(group, index) == own_tokens(same, index)


def test_adapters_share_no_cached_prefixes(make_engine):
    engine = make_engine(num_blocks=400, block_size=8)
    prompt = prompt_of(1, 41)
    first, second = engine.adapter("all"), engine.adapter("mlp")
    seen = []
    for adapter in (first, second, None, first, second, None):
        group = engine.submit(prompt, 2, adapter=adapter)
        engine.run()
        seen.append(group.cached_tokens)
    assert seen == [0, 0, 0, 40, 40, 40]


@pytest.mark.parametrize("name", ["all", "mlp"])
def test_packed_layers_take_adapters(decided_model, make_engine, references, name):
    """In bfloat16, layers are fused and packed, and one kernel computes a SwiGLU's projections."""
    engine = make_engine(num_blocks=400, dtype="bfloat16")
    prompt = prompt_of(8, 60)
    group, base = (
        engine.submit(prompt, 2, prompt_logprobs=0, adapter=engine.adapter(own))
        for own in (name, None)
    )
    engine.run()
    plain = AutoModelForCausalLM.from_pretrained(decided_model, dtype=torch.float32)
    errors = []
    for model, own in ((references[name], group), (plain, base)):
        with torch.inference_mode():
            truth = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
        seen = torch.tensor([scored.logprob for scored in own.prompt_logprobs])
        exact = truth[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        errors.append((seen - exact).abs().mean().item())
    assert errors[0] < 0.02 + 2 * errors[1], errors
