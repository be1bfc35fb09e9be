"""Beam search from client to engine: no output until it ends, then all, best first."""

import pytest

import octavo


@pytest.fixture
def client(served):
    with octavo.Client(served.address) as client:
        yield client


def test_outputs_come_whole_and_best_first(client):
    stream = client.generate("The capital of France is", beam_width=3, max_tokens=8, token_ids=True)
    events = list(stream.events())
    assert isinstance(events[0], octavo.Accepted)
    assert [type(event) for event in events[1:]] == [octavo.Delta, octavo.Finished] * 3
    deltas, ends = events[1::2], events[2::2]
    assert [delta.index for delta in deltas] == [end.index for end in ends] == [0, 1, 2]
    assert [end.score for end in ends] == sorted((end.score for end in ends), reverse=True)
    assert len({delta.token_ids for delta in deltas}) == 3
    assert "Paris" in deltas[0].text
    for delta, end in zip(deltas, ends, strict=True):
        assert end.usage.output_tokens == len(delta.token_ids) <= 8
