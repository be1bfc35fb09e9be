"""Scores and classes of a real server over gRPC and HTTP: those of transformers."""

import httpx2
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

import octavo
from tests.integration.harness import Server
from tests.integration.tiny_bert import save_bert, serve_bert

QUERY = "where is rome"
DOCUMENTS = ["the cat sat on the mat", "rome is in italy", "fish"]
LONG = "a cat sat " * 50


@pytest.fixture(scope="session")
def reranker(tmp_path_factory):
    """Save a tiny cross-encoder."""
    path = tmp_path_factory.mktemp("reranker")
    save_bert(path, AutoModelForSequenceClassification, id2label={0: "relevant"})
    return path


@pytest.fixture(scope="session")
def scorer(reranker, launch_shared) -> Server:
    return serve_bert(launch_shared, reranker)


@pytest.fixture
def client(scorer):
    with octavo.Client(scorer.address) as client:
        yield client


@pytest.fixture
def post(scorer):
    """Return a function that posts a body and returns the response."""
    with httpx2.Client(base_url=scorer.http, trust_env=False) as http:

        def post(path, **body):
            return http.post(path, json=body)

        yield post


@pytest.fixture(scope="session")
def logits(reranker):
    """Return a function of a text and perhaps a second one, by transformers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reranker)
    model = AutoModelForSequenceClassification.from_pretrained(reranker).eval()

    @torch.inference_mode()
    def score(*texts):
        encoded = tokenizer(*texts, truncation=True, max_length=128, return_tensors="pt")
        return float(model(**encoded).logits[0, 0])

    return score


@pytest.fixture(scope="session")
def expected(logits):
    return [logits(QUERY, document) for document in DOCUMENTS]


def sigmoid(values):
    return 1 / (1 + np.exp(-np.array(values)))


def test_scores_are_those_of_transformers(client, logits, expected):
    assert np.ptp(expected) > 1e-3
    result = client.score(QUERY, DOCUMENTS, request_id="mine")
    assert (result.request_id, result.model) == ("mine", "bert")
    assert result.token_counts == (12, 10, 7)
    np.testing.assert_allclose(result.scores, sigmoid(expected), atol=1e-5)
    raw = client.score(DOCUMENTS, DOCUMENTS[::-1], raw=True).scores
    pairs = zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)
    np.testing.assert_allclose(raw, [logits(*pair) for pair in pairs], atol=1e-5)


def test_a_long_pair_is_refused_or_cut_as_transformers_does(client, logits):
    with pytest.raises(octavo.InvalidArgumentError, match=r"documents\[1\] must have 1 to 128"):
        client.score(QUERY, ["fish", LONG])
    for query, document in ((QUERY, LONG), (LONG, LONG)):
        cut = client.score(query, document, truncate=True, raw=True)
        assert cut.token_counts == (128,)
        np.testing.assert_allclose(cut.scores, [logits(query, document)], atol=1e-5)


def test_classes_are_those_of_transformers(client, logits, expected):
    result = client.classify(DOCUMENTS)
    assert result.labels == ("relevant",)
    assert result.best == ("relevant",) * 3
    alone = [logits(text) for text in DOCUMENTS]
    np.testing.assert_allclose(np.ravel(result.scores), sigmoid(alone), atol=1e-5)
    pairs = client.classify([QUERY] * 3, DOCUMENTS, raw=True)
    np.testing.assert_allclose(np.ravel(pairs.scores), expected, atol=1e-5)
    tokens = client.classify(client.tokenize(DOCUMENTS[0]), raw=True)
    np.testing.assert_allclose(tokens.scores[0], alone[:1], atol=1e-5)


async def test_the_asyncio_client(scorer, expected):
    async with octavo.AsyncClient(scorer.address) as client:
        scores = (await client.score(QUERY, DOCUMENTS)).scores
        np.testing.assert_allclose(scores, sigmoid(expected), atol=1e-5)
        assert (await client.classify("fish")).labels == ("relevant",)


@pytest.mark.parametrize(
    ("query", "documents", "why"),
    [
        (QUERY, [], "documents must have at least one entry"),
        (QUERY, ["fish", ""], r"documents\[1\] must have at least one character"),
        ("", ["fish"], r"queries\[0\] must have at least one character"),
        ([QUERY] * 2, ["fish"] * 3, "queries must be one, or as many as documents, 3; got 2"),
        (QUERY, ["fish"] * 2049, "documents may have at most 2048 entries"),
    ],
)
def test_bad_input_is_refused(client, query, documents, why):
    with pytest.raises(octavo.InvalidArgumentError, match=why):
        client.score(query, documents)


def test_second_texts_must_match(client):
    with pytest.raises(octavo.InvalidArgumentError, match="second_texts must be as many as texts"):
        client.classify(["fish", "cat"], ["fish"])


def test_models_do_what_they_say(client, served):
    (model,) = client.list_models()
    assert (model.labels, model.embedding_dimensions) == (("relevant",), 0)
    with pytest.raises(octavo.InvalidArgumentError, match=r"'bert' scores classes.*Classify"):
        client.embed("fish")
    with pytest.raises(octavo.InvalidArgumentError, match=r"'bert' scores classes.*Classify"):
        client.generate("fish").text()
    with octavo.Client(served.address) as other:
        assert other.list_models()[0].labels == ()
        for call in (other.classify, lambda text: other.score(text, text)):
            with pytest.raises(octavo.InvalidArgumentError, match="'demo' generates text"):
                call("fish")


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank(post, expected, path):
    order = np.argsort(expected)[::-1].tolist()
    documents = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
    answer = post(path, model="bert", query=QUERY, documents=documents, top_n=2).json()
    assert [each["index"] for each in answer["results"]] == order[:2]
    for each in answer["results"]:
        np.testing.assert_allclose(
            each["relevance_score"], sigmoid(expected[each["index"]]), atol=1e-5
        )
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    assert answer["usage"] == {"prompt_tokens": 29, "total_tokens": 29}
    bare = post(path, query=QUERY, documents=DOCUMENTS, return_documents=False).json()
    assert not any("document" in each for each in bare["results"])
    teis = post(path, query=QUERY, texts=DOCUMENTS, raw_scores=True, return_text=True).json()
    assert [(each["index"], each["text"]) for each in teis] == [(i, DOCUMENTS[i]) for i in order]
    np.testing.assert_allclose([each["score"] for each in teis], np.sort(expected)[::-1], atol=1e-5)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_score(post, expected, path):
    answer = post(path, text_1=QUERY, text_2=DOCUMENTS).json()
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    scores = [each["score"] for each in answer["data"]]
    np.testing.assert_allclose(scores, sigmoid(expected), atol=1e-5)
    one = post(path, text_1=QUERY, text_2=DOCUMENTS[0], use_activation=False).json()
    np.testing.assert_allclose(one["data"][0]["score"], expected[0], atol=1e-5)


def test_classify(post, logits):
    answer = post("/classify", input=DOCUMENTS[:2]).json()
    for number, each in enumerate(answer["data"]):
        np.testing.assert_allclose(each.pop("probs"), [sigmoid(logits(DOCUMENTS[number]))], 1e-5)
        assert each == {"index": number, "label": "relevant", "num_classes": 1}


@pytest.mark.parametrize(
    ("path", "body", "param", "why"),
    [
        ("/rerank", {"query": QUERY}, "documents", "one of documents and texts must be given"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query", "must have at least one character"),
        ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents", "must have at least one"),
        ("/score", {"text_1": ["a", "a"], "text_2": ["a"] * 3}, "text_1", "as many as"),
        ("/classify", {"input": "a " * 200}, "input[0]", "must have 1 to 128 tokens; it has 202"),
        ("/v1/embeddings", {"input": "a"}, "model", "scores classes"),
    ],
)
def test_bad_input_over_http_is_refused(post, path, body, param, why):
    answer = post(path, **body)
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param
