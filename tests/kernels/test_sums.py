"""Ranks sum in shared memory: exactly, in rank order, and not for ever."""

import pytest

from octavo.kernels import cpu
from tests import preloaded


@pytest.fixture
def start(tmp_path):
    """Start the ranks of some sums; return the processes and their outputs."""
    processes = []

    def start(present, ranks, rounds, patience):
        shared = tmp_path / "shared"
        shared.write_bytes(bytes(cpu.sums.bytes(ranks)))
        outputs = [tmp_path / f"rank-{rank}" for rank in present]
        for rank, output in zip(present, outputs, strict=True):
            arguments = map(str, (shared, rank, ranks, rounds, patience))
            processes.append(
                preloaded.Process("tests.kernels.summing_rank", list(arguments), output)
            )
        return processes, outputs

    yield start
    for process in processes:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_the_same_exact_sums(start, ranks):
    processes, outputs = start(range(ranks), ranks, rounds=3, patience=60)
    codes = [process.wait(120) for process in processes]
    texts = [output.read_text() for output in outputs]
    assert codes == [0] * ranks, texts
    assert len(set(texts)) == 1


def test_a_sum_fails_if_a_rank_does_not_come(start):
    (process,), (output,) = start([0], 2, rounds=1, patience=1)
    assert process.wait(60) != 0
    assert "another rank did not come to a sum" in output.read_text()
