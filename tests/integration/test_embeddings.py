"""Embeddings of a real server over gRPC and HTTP: those of transformers, or a precise error.

Slow tests run mteb and llama-index as PyPI has them, if they are installed: `pip install mteb
sentence-transformers llama-index-embeddings-openai-like`.
"""

import asyncio
import json
import os
import random

import grpc
import httpx2
import numpy as np
import openai
import pytest
import torch
from langchain_openai import OpenAIEmbeddings
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

import octavo
from octavo.cli import app
from octavo.common.thread_priority import NICENESS
from octavo.v1 import engine_pb2, engine_pb2_grpc
from tests.integration.harness import Server, wait_until
from tests.integration.tiny_bert import WORDS, save_bert, serve_bert

TEXTS = ["rome is in italy", "where is rome", "the big red dog sat on the mat " * 6]
QUERY = "query : "
MOST = 60


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """Save a tiny BERT with the files of sentence-transformers."""
    path = tmp_path_factory.mktemp("bert")
    save_bert(path, AutoModel, matryoshka_dimensions=[16])
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"name": str(i), "path": at, "type": f"sentence_transformers.models.{kind}"}
        for i, (at, kind) in enumerate(kinds.items())
    ]
    (path / "1_Pooling").mkdir()
    for name, content in {
        "modules": modules,
        "1_Pooling/config": {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True},
        "sentence_bert_config": {"max_seq_length": MOST},
        "config_sentence_transformers": {
            "prompts": {"query": QUERY},
            "similarity_fn_name": "cosine",
        },
    }.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.fixture(scope="session")
def embedder(bert, launch_shared) -> Server:
    return serve_bert(launch_shared, bert)


@pytest.fixture
def client(embedder):
    with octavo.Client(embedder.address) as client:
        yield client


@pytest.fixture
def http(embedder):
    with openai.OpenAI(base_url=f"{embedder.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def expected(bert):
    """Return a function of a text and its number of dimensions, by transformers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bert)
    model = AutoModel.from_pretrained(bert).eval()

    @torch.inference_mode()
    def embed(text, dimensions=64):
        encoded = tokenizer(text, truncation=True, max_length=MOST, return_tensors="pt")
        mean = model(**encoded).last_hidden_state[0].mean(0)[:dimensions]
        return (mean / mean.norm()).numpy()

    return embed


def test_embeddings_are_those_of_transformers(client, expected):
    result = client.embed(TEXTS, request_id="mine")
    assert (result.request_id, result.model) == ("mine", "bert")
    assert result.token_counts == (6, 5, 50)
    for text, embedding in zip(TEXTS, result.embeddings, strict=True):
        np.testing.assert_allclose(embedding, expected(text), atol=1e-5)


def test_a_prompt_dimensions_and_tokens(client, expected):
    (query,) = client.embed("where is rome", prompt_name="query").embeddings
    np.testing.assert_allclose(query, expected(QUERY + "where is rome"), atol=1e-5)
    (short,) = client.embed("where is rome", dimensions=16).embeddings
    np.testing.assert_allclose(short, expected("where is rome", 16), atol=1e-5)
    tokens = client.tokenize("where is rome")
    (by_tokens,) = client.embed(tokens).embeddings
    np.testing.assert_allclose(by_tokens, expected("where is rome"), atol=1e-5)


def test_a_long_text_is_refused_or_cut(client, expected):
    long = "a cat sat " * 40
    with pytest.raises(octavo.InvalidArgumentError, match=r"texts\[1\] must have 1 to 60 tokens"):
        client.embed(["a", long])
    result = client.embed(["a", long], truncate=True)
    assert result.token_counts == (3, MOST)
    np.testing.assert_allclose(result.embeddings[1], expected(long), atol=1e-5)


def test_many_texts_without_a_server_of_their_own(embedder, expected):
    with octavo.LLM("bert", hosts=[embedder.address], progress=False) as llm:
        embeddings = llm.embed(TEXTS * 50)
        assert len(embeddings) == 150
        np.testing.assert_allclose(embeddings[-1], expected(TEXTS[-1]), atol=1e-5)
        one_by_one = llm.embed((text for text in TEXTS), dimensions=16)
        np.testing.assert_allclose(next(one_by_one), expected(TEXTS[0], 16), atol=1e-5)


@pytest.mark.parametrize(
    ("texts", "options", "why"),
    [
        ([], {}, "texts or tokens must have at least one entry"),
        (["a", ""], {}, r"texts\[1\] must have at least one character"),
        ([[]], {}, r"tokens\[0\] must have at least one token"),
        ([[2], [999]], {}, r"tokens\[1\].token_ids\[0\] must be in \[0, 21\]; got 999"),
        (["a"] * 2049, {}, "texts may have at most 2048 entries"),
        ("a", {"dimensions": 32}, "dimensions must be 16 or 64, which .*; got 32"),
        ("a", {"dimensions": 0}, "dimensions must be 16 or 64, which .*; got 0"),
        ("a", {"prompt_name": "none"}, "prompt_name must be one of .* 'none', of: query"),
        ([2, 3], {"prompt_name": "query"}, "prompt_name is for texts"),
        ("a", {"priority": 101}, r"priority must be in \[-100, 100\]"),
    ],
)
def test_bad_input_is_refused(client, texts, options, why):
    with pytest.raises(octavo.InvalidArgumentError, match=why):
        client.embed(texts, **options)


def test_models_say_what_they_do(client, served):
    (model,) = client.list_models()
    assert (model.embedding_dimensions, model.similarity) == (64, "cosine")
    assert model.prompt_names == ("query",)
    with pytest.raises(octavo.InvalidArgumentError, match="'bert' embeds texts: use Embed"):
        client.generate("a cat").text()
    with octavo.Client(served.address) as other:
        assert other.list_models()[0].embedding_dimensions == 0
        with pytest.raises(octavo.InvalidArgumentError, match="'demo' generates text"):
            other.embed("a cat")


def test_openais_client_gets_the_same(http, client):
    direct = np.array(client.embed(TEXTS).embeddings)
    by_default = http.embeddings.create(model="bert", input=TEXTS)
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens == 61
    floats = http.embeddings.create(model="bert", input=TEXTS, encoding_format="float")
    for answer in (by_default, floats):
        assert [each.index for each in answer.data] == [0, 1, 2]
        np.testing.assert_array_equal(
            np.array([each.embedding for each in answer.data], np.float32), direct
        )
    tokens = http.embeddings.create(model="bert", input=[[2, 5, 3]], dimensions=16)
    assert len(tokens.data[0].embedding) == 16


def test_langchains_embeddings_are_the_same(embedder, expected):
    embeddings = OpenAIEmbeddings(
        model="bert",
        base_url=f"{embedder.http}/v1",
        api_key="none",
        check_embedding_ctx_length=False,
    )
    for text, embedding in zip(TEXTS, embeddings.embed_documents(TEXTS), strict=True):
        np.testing.assert_allclose(embedding, expected(text), atol=1e-5)


def test_a_file_is_embedded(embedder, expected, tmp_path):
    file = tmp_path / "texts.jsonl"
    rows = [json.dumps(TEXTS[0]), "", json.dumps({"id": 7, "text": TEXTS[1]})] * 100
    file.write_text("\n".join(rows))
    done = CliRunner().invoke(app, ["embed", str(file), "--address", embedder.address])
    assert done.exit_code == 0, done.output
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row.get("id") for row in made] == [None, 7] * 100
    for row in made[-2:]:
        np.testing.assert_allclose(row["embedding"], expected(row["text"]), atol=1e-5)
    file.write_text('"a"\n{"id": 7}')
    done = CliRunner().invoke(app, ["embed", str(file), "--address", embedder.address])
    assert done.exit_code == 1
    assert "line 2 is neither a JSON string nor an object" in done.stderr


def test_tei_s_embed_is_the_same(embedder, expected):
    with httpx2.Client(base_url=embedder.http, trust_env=False) as http:
        answer = http.post("/embed", json={"inputs": TEXTS, "normalize": True}).json()
        np.testing.assert_allclose(answer, [expected(text) for text in TEXTS], atol=1e-5)
        refused = http.post("/embed", json={"inputs": "a", "normalize": False})
    assert refused.status_code == 400
    assert "normalize is supported only as true" in refused.json()["error"]["message"]


async def test_the_asyncio_client_embeds_many_at_once(embedder, expected):
    async with octavo.AsyncClient(embedder.address) as client:
        results = await asyncio.gather(*(client.embed([text] * 30) for text in TEXTS))
    for text, result in zip(TEXTS, results, strict=True):
        for embedding in result.embeddings:
            np.testing.assert_allclose(embedding, expected(text), atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"input": ""}, "input[0]", "input[0] must have at least one character"),
        ({"input": []}, "input", "input must be a string, a list of strings, a list of token ids"),
        ({"input": "a " * 99}, "input[0]", "input[0] must have 1 to 60 tokens; it has 101"),
        ({"input": "a", "dimensions": 5}, "dimensions", "dimensions must be 16 or 64"),
        ({"input": "a", "extra_body": {"normalize": False}}, "normalize", "is not supported"),
    ],
)
def test_bad_input_over_http_is_refused(http, body, param, why):
    with pytest.raises(openai.BadRequestError) as caught:
        http.embeddings.create(model="bert", **body)
    assert why in caught.value.message
    assert caught.value.param == param


def test_a_chat_is_refused_by_name(http):
    with pytest.raises(openai.BadRequestError, match="embeds texts: use Embed"):
        http.chat.completions.create(model="bert", messages=[{"role": "user", "content": "a"}])


def test_it_computes_at_a_lower_priority(embedder):
    (engine,) = (one for one in embedder.children() if one.num_threads() > 4)
    threads = [thread.id for thread in engine.threads()]
    assert NICENESS in {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}


def test_a_call_past_its_deadline_ends_everywhere(client, embedder):
    with pytest.raises(octavo.DeadlineExceededError):
        client.embed(TEXTS * 600, timeout=0.02)
    metric = "octavo_engine_groups"
    port = embedder.metrics_port + 1
    wait_until(lambda: not embedder.metric(metric, port=port, state="running"))
    assert len(client.embed("a").embeddings) == 1


def test_requests_migrate_from_an_engine_that_dies(bert, launch, expected):
    flags = ("--model", str(bert), "--served-model-name", "bert")
    engines = [launch("engine", *flags).wait_ready() for _ in range(2)]
    addresses = [flag for engine in engines for flag in ("--engine", engine.address)]
    router = launch("router", *addresses).wait_ready()
    with octavo.Client(router.address) as client:
        wait_until(lambda: client.list_models()[0].engines == 2)
        engines[0].kill()
        for _ in range(4):
            (embedding,) = client.embed(TEXTS[0]).embeddings
            np.testing.assert_allclose(embedding, expected(TEXTS[0]), atol=1e-5)


def test_an_engine_refuses_what_no_router_sends(bert, launch):
    engine = launch("engine", "--model", str(bert)).wait_ready()
    with grpc.insecure_channel(engine.address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        for fields, why in (
            ({"token_ids": [2, 3], "lengths": [1]}, "with 2 tokens together; they are of 1"),
            ({"token_ids": [2] * 61, "lengths": [61]}, "lengths must be in [1, 60]"),
            ({"token_ids": [2], "lengths": [1, 0]}, "lengths must be in [1, 60]"),
            ({"token_ids": [99], "lengths": [1]}, "token_ids[0] must be in [0, 21]"),
            ({"token_ids": [2], "lengths": [1], "dimensions": 65}, "dimensions must be in [1, 64]"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Embed(engine_pb2.EngineServiceEmbedRequest(**fields))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert why in caught.value.details()
        submit = engine_pb2.Submit(request_id="r", prompt_token_ids=[2])
        commands = iter([engine_pb2.SessionRequest(submit=submit)])
        for response in stub.Session(commands):
            if response.failures:
                assert response.failures[0].code == grpc.StatusCode.UNIMPLEMENTED.value[0]
                assert "does not generate" in response.failures[0].message
                break


@pytest.mark.slow
def test_llama_index_gets_the_same(embedder, expected):
    openai_like = pytest.importorskip("llama_index.embeddings.openai_like")
    model = openai_like.OpenAILikeEmbedding(
        model_name="bert", api_base=f"{embedder.http}/v1", api_key="none", embed_batch_size=2
    )
    for text, embedding in zip(TEXTS, model.get_text_embedding_batch(TEXTS), strict=True):
        np.testing.assert_allclose(embedding, expected(text), atol=1e-5)
    np.testing.assert_allclose(model.get_query_embedding(TEXTS[0]), expected(TEXTS[0]), atol=1e-5)


@pytest.mark.slow
def test_an_mteb_task_scores_as_by_sentence_transformers(embedder, bert):
    mteb = pytest.importorskip("mteb")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    datasets = pytest.importorskip("datasets")
    draw = random.Random(0)
    rows = []
    for _ in range(60):
        one = draw.choices(WORDS, k=8)
        kept = draw.randint(0, 8)
        other = one[:kept] + draw.choices(WORDS, k=8 - kept)
        rows.append({"sentence1": " ".join(one), "sentence2": " ".join(other), "score": kept})

    class Task(mteb.abstasks.AbsTaskSTS):
        metadata = mteb.TaskMetadata(
            name="Words",
            description="Random words, of which some are the same.",
            dataset={"path": "none", "revision": "1"},
            type="STS",
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
        )
        min_score, max_score = 0, 8

        def load_data(self, **_):
            self.dataset = datasets.DatasetDict(test=datasets.Dataset.from_list(rows))
            self.data_loaded = True

    class Served:
        mteb_model_meta = mteb.models.ModelMeta.create_empty()

        def __init__(self, client):
            self.client = client

        def encode(self, inputs, **_):
            texts = [text for batch in inputs for text in batch["text"]]
            answer = self.client.embeddings.create(model="bert", input=texts)
            return np.array([each.embedding for each in answer.data], np.float32)

        def similarity(self, a, b):
            return cosine_similarity(torch.tensor(a)[:, None], torch.tensor(b)[None], dim=-1)

        def similarity_pairwise(self, a, b):
            return cosine_similarity(torch.tensor(a), torch.tensor(b))

    def score(model):
        (result,) = mteb.evaluate(model, Task(), cache=None).task_results
        return result.scores["test"][0]["cosine_spearman"]

    with openai.OpenAI(base_url=f"{embedder.http}/v1", api_key="none") as client:
        served = score(Served(client))
    own = score(sentence_transformers.SentenceTransformer(str(bert), device="cpu"))
    assert served == pytest.approx(own, abs=1e-6)
    assert own > 0.5, "the task tells texts apart"
