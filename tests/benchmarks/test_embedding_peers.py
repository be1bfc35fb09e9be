"""The benchmark of peers that embed: its texts, its batches and its page."""

import numpy as np
import pytest

from benchmarks.peers import embeddings
from benchmarks.peers.embeddings import Peer, Result
from benchmarks.peers.workers.embedders import Embedder, by_length
from benchmarks.peers.workers.protocol import Embedded, Texts

WORKS = {
    "short": Texts(["a"] * 100, alone=False),
    "long": Texts(["b" * 50] * 10, alone=False),
    "one": Texts(["a"] * 4, alone=True),
}


def result(worker, seconds, vector, **options):
    made = {name: Embedded([seconds] * 4, [vector]) for name in WORKS}
    return Result(Peer(f"{worker} {options}", worker, options), made, "version 1")


def test_texts_are_the_same_each_time_and_as_long_as_stated():
    short, long = embeddings.short_texts(300), embeddings.long_texts(300)
    assert short == embeddings.short_texts(300)
    assert long == embeddings.long_texts(300)
    assert (len(set(short)), len(set(long))) == (300, 300)
    assert max(map(len, short)) <= embeddings.SHORT
    assert np.mean(list(map(len, long))) == pytest.approx(embeddings.LONG, rel=0.15)


def test_a_peer_runs_with_its_fastest_batch_and_keeps_the_texts_order():
    sizes = []

    def embed(texts, size):
        sizes.append(size)
        return [[float(len(text))] for text in texts]

    embedder = Embedder(by_length(embed), (8, 32))
    texts = ["x" * (i % 7 + 1) for i in range(70)]
    made = embedder.run([Texts(texts, alone=False)])
    assert made.note in {"batches of 8", "batches of 32"}
    assert [vector[0] for vector in made.embeddings] == [len(text) for text in texts[:32]]
    assert {8, 32} == set(sizes)
    alone = embedder.run([Texts(texts[:5], alone=True)])
    assert len(alone.seconds) == len(alone.embeddings) == 5


def test_the_page_compares_with_the_fastest_of_the_others():
    results = [
        result("octavo", 1.0, [1.0, 0.0]),
        result("fast", 2.0, [1.0, 0.0]),
        result("sentence_transformers", 5.0, [0.6, 0.8]),
    ]
    results.append(Result(Peer("gone", "gone"), failure="pip ended with 1"))
    page = embeddings.report(results, WORKS)
    assert "| octavo {} | 100 | 10 | 1000.0 ms | 1000.0 ms | 0.60000 | - |" in page
    assert "- octavo {}: 2.00 times fast {} (short), 2.00 times fast {} (long)." in page
    assert "- gone failed: pip ended with 1" in page
