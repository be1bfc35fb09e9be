"""vLLM's contract over real gRPC: what its reference servicer does, and what is refused."""

import asyncio
import hashlib
import io
import json
import zipfile

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2

from benchmarks.fixture import EOS
from octavo.engine.metrics import used_blocks
from tests.engine.rpc.vllm.conftest import serving

PROMPT = list(range(40, 80))


def request(prompt=PROMPT, *, stream=True, request_id="r", **sampling):
    fields = {"temperature": 0, "max_tokens": 8} | sampling
    params = ParseDict(
        {name: value for name, value in fields.items() if value is not None},
        vllm_engine_pb2.SamplingParams(),
    )
    return vllm_engine_pb2.GenerateRequest(
        request_id=request_id,
        tokenized={"input_ids": prompt},
        sampling_params=params,
        stream=stream,
    )


async def generate(engine, *args, **kwargs):
    """The chunks' tokens by output, and the last response of each."""
    tokens, ends, chunks = {}, {}, []
    async for response in engine.stub.Generate(request(*args, **kwargs)):
        if response.HasField("chunk"):
            assert response.chunk.index not in ends
            chunks.append(response.chunk)
            tokens.setdefault(response.chunk.index, []).extend(response.chunk.token_ids)
        else:
            ends[response.complete.index] = response.complete
    return tokens, ends, chunks


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details()


async def idle(engine):
    async with asyncio.timeout(20):
        while not (engine.core.idle and used_blocks(engine.core.load) == 0):
            await asyncio.sleep(0.01)


async def test_tokens_are_streamed_and_come_whole(engine):
    tokens, ends, chunks = await generate(engine, n=2)
    assert len(tokens[0]) == len(tokens[1]) == 8
    assert tokens[0] == tokens[1]
    assert {end.finish_reason for end in ends.values()} == {"length"}
    assert sum(chunk.completion_tokens for chunk in chunks) == 16
    assert {chunk.prompt_tokens for chunk in chunks} == {40}
    streamed, whole, _ = await generate(engine, n=2, stream=False)
    assert streamed == {}
    assert [list(whole[i].output_ids) for i in (0, 1)] == [tokens[0], tokens[1]]
    assert {end.cached_tokens for end in whole.values()} == {32}
    assert {end.completion_tokens for end in whole.values()} == {8}


async def test_what_is_not_set_is_sampled_at_temperature_one(engine):
    unset = [await generate(engine, temperature=None, seed=-7, max_tokens=40) for _ in range(2)]
    one, _, _ = await generate(engine, temperature=1, seed=-7, max_tokens=40)
    greedy, _, _ = await generate(engine, max_tokens=40)
    assert unset[0][0] == unset[1][0] == one != greedy


async def test_log_probabilities(engine):
    _, ends, chunks = await generate(engine, logprobs=2, prompt_logprobs=1, n=2, seed=1)
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk.index == index]
        scored = [token for chunk in own for token in chunk.output_logprobs.token_ids]
        assert scored == [token for chunk in own for token in chunk.token_ids]
        for scores in (chunk.output_logprobs for chunk in own):
            assert [len(top.token_ids) for top in scores.top_logprobs] == [2] * len(
                scores.token_ids
            )
            assert [top.values[0] for top in scores.top_logprobs] == scores.token_logprobs
        assert own[0].HasField("input_logprobs")
        assert not any(chunk.HasField("input_logprobs") for chunk in own[1:])
    scores = ends[0].input_logprobs
    assert list(scores.token_ids) == PROMPT
    assert [score.HasField("value") for score in scores.token_logprobs] == [False] + [True] * 39
    assert [len(top.values) for top in scores.top_logprobs] == [0] + [1] * 39


async def test_outputs_end_as_in_vllm(engine, tokenizer):
    free, _, _ = await generate(engine, max_tokens=60)
    text = tokenizer.decode(free[0])
    stop = next(t for t in free[0][5:] if t != free[0][0])
    first = free[0].index(stop)
    tokens, ends, _ = await generate(engine, max_tokens=60, stop_token_ids=[stop])
    assert tokens[0] == free[0][: first + 1]
    assert (ends[0].finish_reason, ends[0].matched_token_id) == ("stop", stop)
    # A stop string, across tokens, ends it by the engine's own reading.
    word = text[10:14]
    end = text.index(word) + len(word)
    tokens, ends, _ = await generate(engine, max_tokens=60, stop=["nowhere", word])
    assert tokenizer.decode(tokens[0]).endswith(word)
    assert len(tokenizer.decode(tokens[0])) == end
    assert (ends[0].finish_reason, ends[0].matched_stop_str) == ("stop", word)
    # More than the context leaves is what it leaves.
    tokens, ends, _ = await generate(engine, PROMPT * 24, max_tokens=5000, ignore_eos=True)
    assert len(tokens[0]) == 1024 - len(PROMPT * 24)
    assert ends[0].finish_reason == "length"
    await idle(engine)


async def test_outputs_keep_to_their_form(engine, tokenizer):
    schema = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    for form, fits in (
        ({"json_schema": schema}, lambda text: json.loads(text)["a"] in (1, 2)),
        ({"regex": "[ab]{4}x"}, lambda text: len(text) == 5 and text.endswith("x")),
        ({"grammar": 'root ::= "yes" | "no"'}, lambda text: text in ("yes", "no")),
        ({"grammar": 'start: "yes" | "no"'}, lambda text: text in ("yes", "no")),
        ({"choice": {"choices": ["red", "blue"]}}, lambda text: text in ("red", "blue")),
    ):
        tokens, ends, _ = await generate(engine, **form, max_tokens=60, seed=3, temperature=1)
        assert tokens[0][-1] == EOS
        assert fits(tokenizer.decode(tokens[0])), form
        assert ends[0].finish_reason == "stop"


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("sampling", "code", "named"),
    [
        ({"top_p": 1.5}, "INVALID_ARGUMENT", "top_p"),
        ({"temperature": -1}, "INVALID_ARGUMENT", "temperature"),
        ({"logprobs": -1}, "INVALID_ARGUMENT", "logprobs"),
        ({"logprobs": 21}, "INVALID_ARGUMENT", "logprobs"),
        ({"n": 1000}, "INVALID_ARGUMENT", "sampling.n"),
        ({"max_tokens": 0}, "INVALID_ARGUMENT", "max_tokens"),
        ({"logit_bias": {-1: 1}}, "INVALID_ARGUMENT", "logit_bias"),
        ({"stop_token_ids": [999]}, "INVALID_ARGUMENT", "stop.token_ids"),
        ({"stop": [""]}, "INVALID_ARGUMENT", "stop.strings"),
        ({"json_schema": "{"}, "INVALID_ARGUMENT", "EOF"),
        ({"grammar": "root ::= ((("}, "INVALID_ARGUMENT", "GBNF"),
        ({"grammar": "#" * (1 << 16)}, "INVALID_ARGUMENT", "32768 characters"),
        ({"structural_tag": "{}"}, "UNIMPLEMENTED", "structural_tag"),
        ({"truncate_prompt_tokens": 5}, "UNIMPLEMENTED", "truncate_prompt_tokens"),
    ],
)
async def test_parameters_that_are_refused(engine, sampling, code, named):
    found, details = await refused(engine.stub.Generate(request(**sampling)).read())
    assert found == code
    assert named in details


async def test_requests_that_are_refused(engine):
    for fields, code, named in (
        ({"text": "hello"}, "UNIMPLEMENTED", "input_ids"),
        ({"mm_inputs": {}}, "UNIMPLEMENTED", "mm_inputs"),
        ({"media_refs": {}}, "UNIMPLEMENTED", "media_refs"),
        ({"kv_transfer_params_json": "{}"}, "UNIMPLEMENTED", "kv_transfer"),
        ({"data_parallel_rank": 1}, "INVALID_ARGUMENT", "data_parallel_rank"),
        ({}, "INVALID_ARGUMENT", "prompt"),
        ({"tokenized": {"input_ids": [257]}}, "INVALID_ARGUMENT", "[0, 256]"),
        ({"tokenized": {"input_ids": [1]}, "request_id": "x" * 129}, "INVALID_ARGUMENT", "128"),
    ):
        message = vllm_engine_pb2.GenerateRequest(**fields)
        found, details = await refused(engine.stub.Generate(message).read())
        assert (found, named in details) == (code, True), details
    embed = vllm_engine_pb2.EmbedRequest(tokenized={"input_ids": [1]})
    assert (await refused(engine.stub.Embed(embed)))[0] == "UNIMPLEMENTED"


@pytest.mark.parametrize("how", ["cancel", "abort"])
async def test_what_nobody_waits_for_is_aborted(engine, how):
    long = {"max_tokens": 900, "ignore_eos": True, "n": 2}
    calls = [engine.stub.Generate(request(request_id=f"r{i % 2}", **long)) for i in range(4)]
    streams = [aiter(call) for call in calls]
    for stream in streams:
        await anext(stream)
    if how == "cancel":
        for call in calls:
            call.cancel()
    else:  # each id was used twice
        ids = ["r0", "r1", "unknown"]
        await engine.stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=ids))
        for stream in streams:
            ends = [r.complete async for r in stream if r.HasField("complete")]
            assert [end.finish_reason for end in ends] == ["abort", "abort"]
    await idle(engine)
    tokens, _, _ = await generate(engine)
    assert len(tokens[0]) == 8


async def test_a_slow_reader_gets_what_a_fast_one_gets(engine):
    fast, _, _ = await generate(engine, max_tokens=300, ignore_eos=True, seed=2, temperature=1)
    message = request(max_tokens=300, ignore_eos=True, seed=2, temperature=1)
    stream = aiter(engine.stub.Generate(message))
    tokens = list((await anext(stream)).chunk.token_ids)
    await idle(engine)
    async for response in stream:
        tokens += response.chunk.token_ids
    assert tokens == fast[0]


async def test_information_and_load(engine, byte_model):
    info = await engine.stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    assert (info.model_path, info.served_model_name) == (byte_model, byte_model)
    assert (info.max_context_length, info.vocab_size) == (1024, 257)
    assert (info.model_type, list(info.architectures)) == ("llama", ["LlamaForCausalLM"])
    assert list(info.eos_token_ids) == [EOS]
    server = await engine.stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
    assert (server.server_type, server.block_size) == ("vllm-grpc", 16)
    calls = [
        engine.stub.Generate(request(max_tokens=900, ignore_eos=True, prompt=range(i, i + 64)))
        for i in range(3)
    ]
    for call in calls:
        await call.read()
    (load,) = (await engine.stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads
    assert (load.num_running_reqs, load.num_waiting_reqs) == (3, 0)
    assert 3 * 64 <= load.num_used_tokens < load.max_total_num_tokens == 256 * 16
    assert 0 < load.token_usage < 1
    assert load.gen_throughput > 0
    for call in calls:
        call.cancel()
    await idle(engine)


async def test_the_tokenizer_is_sent(engine):
    chunks = [c async for c in engine.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert {chunk.sha256 for chunk in chunks[:-1]} <= {""}
    names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(names)


async def test_before_the_model_is_loaded_and_while_it_drains(byte_model):
    async with serving(byte_model) as engine:
        probe = vllm_engine_pb2.HealthCheckRequest()
        assert not (await engine.stub.HealthCheck(probe)).healthy
        code, details = await refused(engine.stub.Generate(request()).read())
        assert (code, "loading" in details) == ("UNAVAILABLE", True)
        engine.start()
        assert (await engine.stub.HealthCheck(probe)).healthy
        engine.core.drain()
        async with asyncio.timeout(10):
            while (await engine.stub.HealthCheck(probe)).healthy:
                await asyncio.sleep(0.01)
        assert (await refused(engine.stub.Generate(request()).read()))[0] == "UNAVAILABLE"


async def test_bytes_that_are_no_message(engine):
    for name in ("Generate", "SubscribeKvEvents", "GetTokenizer"):
        call = engine.channel.unary_stream(f"/vllm.grpc.engine.VllmEngine/{name}")
        code, details = await refused(call(b"\xff\xff garbage").read())
        assert (code, "not a valid protobuf" in details) == ("INVALID_ARGUMENT", True)
    for name in ("Abort", "GetLoads", "HealthCheck"):
        call = engine.channel.unary_unary(f"/vllm.grpc.engine.VllmEngine/{name}")
        assert (await refused(call(b"\x0a\xff\x01garbage")))[0] == "INVALID_ARGUMENT"
    await idle(engine)
    tokens, _, _ = await generate(engine)
    assert len(tokens[0]) == 8
