"""An engine with the GPU's kernels; see tests/kernels/triton_device.py."""

import gc
from functools import partial
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

from octavo.engine.execution.cuda_graphs import cuda_recorder
from octavo.engine.execution.graph_sizes import step_sizes
from octavo.engine.models import load_model
from octavo.engine.models.quantization.gpu_weight import round_to_fp8, round_to_int4, round_to_int8
from octavo.engine.settings import EngineSettings
from octavo.engine.speculation.speculation import Speculation
from octavo.engine.startup.build import build
from octavo.kernels.quantized import dequantize
from tests.engine.models.quantization.formats import packers
from tests.engine.models.quantization.formats.quantize import quantize, reference_logits
from tests.engine.oracle import Oracle
from tests.engine.random_model import save_random_model
from tests.engine.stepper import Stepper
from tests.kernels.triton_device import INTERPRETED, MARKS

RECORD = "octavo.engine.startup.record"
OUTPUT_TOKENS = 5
LENGTHS = (1, 7, 16, 40)

pytestmark = MARKS


@pytest.fixture
def engine(tiny_model, request):
    """Create an engine that runs a prompt of each length in chunks."""
    if INTERPRETED:
        request.getfixturevalue("on_triton")

    def make(*, async_scheduling=False, model=tiny_model, **settings):
        settings = {"compile": "off", "num_blocks": 64, "swap_space": 0.01} | settings
        return Stepper(
            build(
                EngineSettings(
                    model=str(model),
                    dtype="float32",
                    max_num_seqs=4,
                    max_num_batched_tokens=24,
                    **settings,
                )
            ),
            async_scheduling=async_scheduling,
        )

    return make


def prompts():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 500, (sum(LENGTHS),), generator=generator).tolist()
    ends = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    return [tokens[begin:end] for begin, end in pairwise(ends)]


@pytest.fixture(scope="module")
def expected(tiny_model):
    return greedy(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))


def greedy(model):
    """Return transformers' own outputs for the prompts."""
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        options = {"min_new_tokens": OUTPUT_TOKENS, "do_sample": False}
        output = model.generate(ids, max_new_tokens=OUTPUT_TOKENS, **options)
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


ROUNDED = {"int8": round_to_int8, "int4": round_to_int4, "fp8": round_to_fp8}


def dequantized(model, scheme):
    """Return transformers' model with a scheme's dequantized weights."""
    for path, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and (path != "lm_head" or scheme == "int4"):
            kind = "int8" if path == "lm_head" else scheme
            rounded = ROUNDED[kind](layer.weight.detach()).weight
            layer.weight = torch.nn.Parameter(dequantize(rounded))
    return model


@pytest.fixture
def packs_as_on_a_gpu(monkeypatch):
    if INTERPRETED:
        cpu = torch.device("cpu")
        monkeypatch.setattr(
            load_model, "_pack", lambda *given: load_model._pack_on_gpu(given[0], *given[3:], cpu)
        )
        monkeypatch.setattr(load_model, "check_quantization", lambda *_: None)


@pytest.mark.usefixtures("packs_as_on_a_gpu")
def test_experts_in_mxfp4(tmp_path, engine):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256}
    config = GptOssConfig(**sizes, **heads, **own, eos_token_id=2, pad_token_id=0)
    save_random_model(config, tmp_path / "model", std=0.1)
    exact = quantize(tmp_path / "model", {"quant_method": "mxfp4"}, packers.mxfp4)
    reference_logits(config, exact, torch.arange(9), torch.float32, tmp_path / "exact")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32)
    assert run(engine(model=tmp_path / "model")) == greedy(model)


@pytest.mark.parametrize("scheme", ROUNDED)
@pytest.mark.usefixtures("packs_as_on_a_gpu")
def test_quantized_weights(tiny_model, engine, scheme):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = greedy(dequantized(model, scheme))
    assert run(engine(quantization=scheme)) == expected


def run(engine):
    groups = [
        engine.submit(prompt, OUTPUT_TOKENS, eos=[2], min_tokens=OUTPUT_TOKENS)
        for prompt in prompts()
    ]
    engine.run()
    mixed = [
        set((batch.ends - batch.starts == 1).tolist()) == {True, False} for batch in engine.batches
    ]
    assert any(mixed), "no step had both decodes and a chunk of a prompt"
    return [group.sequences[0].token_ids[group.sequences[0].num_prompt :] for group in groups]


def test_greedy_tokens_are_those_of_transformers(engine, expected):
    assert run(engine()) == expected


@pytest.mark.skipif(INTERPRETED, reason="a CPU compiles in another way: see test_jit.py")
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_so_they_are_when_it_is_compiled(engine, expected, async_scheduling):
    compiled = engine(async_scheduling=async_scheduling, compile="auto")
    assert compiled.parts.executor.compiled
    assert run(compiled) == expected


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
def test_recorded_decodes_read_nothing_that_was_freed(engine, expected, monkeypatch):
    monkeypatch.setattr(f"{RECORD}.cuda_recorder", partial(cuda_recorder, check_inputs=True))
    recorded = engine()
    assert recorded.parts.executor._recorded._graphs
    gc.collect()
    torch.full((1 << 28,), -1, dtype=torch.int32, device="cuda")  # in freed memory
    assert run(recorded) == expected


def again(work):
    """Record without a GPU: a replay runs the work again."""
    work()
    return work


def test_drafts_are_verified_by_replays(engine, expected, monkeypatch):
    monkeypatch.setattr(f"{RECORD}.cuda_recorder", partial(cuda_recorder, check_inputs=True))
    recorded = engine(speculation="ngram", num_speculative_tokens=3)
    executor = recorded.parts.executor
    if INTERPRETED:  # a graph's kernels, launched one by one
        executor.record_graphs(step_sizes(4, 3), 512, again)
    known = [prompt + output for prompt, output in zip(prompts(), expected, strict=True)]
    recorded.scheduler.speculation = Speculation(Oracle(known), 3)
    (graphs,), replayed = executor._recorded._graphs, []
    choose = graphs.choose

    def note(inputs):
        size = choose(inputs)
        replayed.append((inputs.groups[0].max_query_len, size is not None))
        return size

    monkeypatch.setattr(graphs, "choose", note)
    assert run(recorded) == expected
    assert {(2, True), (3, True), (4, True)} & set(replayed), "no draft was replayed"


def test_chunks_beside_decodes_are_replayed(engine, expected, monkeypatch):
    monkeypatch.setattr(f"{RECORD}.cuda_recorder", partial(cuda_recorder, check_inputs=True))
    recorded = engine()
    executor = recorded.parts.executor
    if INTERPRETED:
        # One program per item takes long.
        monkeypatch.setattr("octavo.kernels.triton.splits.MAX_WAVES", {"decode": 1, "chunk": 1})
        executor.record_graphs(step_sizes(4, 0, 24), 512, again)
    (graphs,), replayed = executor._recorded._graphs, []
    choose = graphs.choose

    def note(inputs):
        size = choose(inputs)
        replayed.append((len(inputs.groups[0].seq_lens), inputs.num_chunks, size is not None))
        return size

    monkeypatch.setattr(graphs, "choose", note)
    assert run(recorded) == expected
    assert all(was for *_, was in replayed)
    assert any(count > chunks > 0 for count, chunks, _ in replayed)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_blocks_that_were_swapped_are_as_they_were(engine, expected, async_scheduling):
    # Blocks of 8 tokens: too few for all requests at once.
    short = {"num_blocks": 11, "block_size": 8, "preemption": "swap"}
    assert run(engine(async_scheduling=async_scheduling, **short)) == expected


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels wait for everything")
def test_the_host_never_waits_for_the_gpu_but_for_what_it_drew(engine):
    ahead = engine(async_scheduling=True)
    ways = (
        {},
        {"temperature": 0.8, "top_p": 0.9, "logit_bias": {7: 1.0}},
        {"temperature": 1.0, "logprobs": 2},
        {"temperature": 0.7, "top_k": 20, "min_tokens": 30, "eos": [2]},
    )
    for prompt, way in zip(prompts(), ways, strict=True):
        ahead.submit(prompt, 40, **way)
    while any(group.sequences[0].num_known_output < 5 for group in ahead.scheduler.groups()):
        ahead.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            ahead.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ahead.run()


def test_an_fp8_cache_takes_a_quarter_of_the_memory_and_gives_like_logits(engine):
    wide, narrow = engine(), engine(kv_cache_dtype="fp8_e4m3")
    assert narrow.parts.block_bytes * 4 == wide.parts.block_bytes
    prompt = prompts()[-1][:20]
    groups = [stepper.submit(prompt, 2, prompt_logprobs=1) for stepper in (wide, narrow)]
    for stepper in (wide, narrow):
        stepper.run()
    ours, theirs = (
        torch.tensor([found.logprob for found in group.prompt_logprobs]) for group in groups
    )
    assert (ours - theirs).abs().max() < 0.1
    assert not torch.equal(ours, theirs)


def test_seeded_tokens_do_not_depend_on_the_batch(engine):
    params = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
    together = engine()
    groups = [
        together.submit(prompt, OUTPUT_TOKENS, seed=seed, **params)
        for seed, prompt in enumerate(prompts())
    ]
    together.submit(prompts()[0], OUTPUT_TOKENS, temperature=1.0)
    together.run()
    for seed, (prompt, group) in enumerate(zip(prompts(), groups, strict=True)):
        alone = engine()
        same = alone.submit(prompt, OUTPUT_TOKENS, seed=seed, **params)
        alone.run()
        assert same.sequences[0].token_ids == group.sequences[0].token_ids


@pytest.fixture(scope="module")
def large_model(tmp_path_factory):
    """A model of SmolLM2-135M's shape with random weights."""
    path = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.skipif(INTERPRETED, reason="interpreted, so many layers take minutes")
@pytest.mark.parametrize(
    ("dtype", "mode", "allowed"),
    [("float32", "off", 1e-3), ("float16", "off", 0.02), ("bfloat16", "auto", 0.1)],
)
def test_a_real_models_shape_gives_what_a_cpu_computes_in_float32(
    large_model, dtype, mode, allowed
):
    settings = {"compile": mode, "num_blocks": 64, "swap_space": 0, "max_num_seqs": 4}
    ours = Stepper(build(EngineSettings(model=str(large_model), dtype=dtype, **settings)))
    model = AutoModelForCausalLM.from_pretrained(large_model, dtype=torch.float32)
    prompt = torch.arange(3, 300, 2)
    group = ours.submit(prompt.tolist(), OUTPUT_TOKENS, prompt_logprobs=1)
    ours.run()
    found = torch.tensor([entry.logprob for entry in group.prompt_logprobs])
    with torch.inference_mode():
        logprobs = model(prompt[None]).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, prompt[1:, None])[:, 0]
    assert (found - expected).abs().max() < allowed
    if dtype == "float32":
        options = {"max_new_tokens": OUTPUT_TOKENS, "do_sample": False}
        tokens = model.generate(prompt[None], **options)[0].tolist()
        assert group.sequences[0].token_ids == tokens
