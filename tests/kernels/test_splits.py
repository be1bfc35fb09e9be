"""How many pieces long sequences are cut into."""

import pytest

pytest.importorskip("triton")

from octavo.kernels.triton.splits import LEAST_KEYS, MAX_SPLITS, choose_splits

H100 = 2 * 132  # places, of decodes


@pytest.mark.parametrize("programs", [1, 8, 32, 128, 264, 512, 2048])
@pytest.mark.parametrize("longest", [0, 1, 255, 2048, 32768, 131072])
def test_pieces_are_worth_their_while(programs, longest):
    splits = choose_splits(programs, longest, H100)
    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or longest / splits >= LEAST_KEYS


@pytest.mark.parametrize("programs", [4, 8, 32, 100, 128, 265, 400])
def test_long_sequences_keep_the_whole_gpu_busy(programs):
    run = programs * choose_splits(programs, 32768, H100)
    assert run >= 0.85 * -(-run // H100) * H100


@pytest.mark.parametrize("programs", [264, 512, 2048])
def test_enough_sequences_are_not_cut(programs):
    assert choose_splits(programs, 2048, H100) == 1


def test_what_fills_the_gpu_by_itself_is_not_cut():
    # Chunks of prompts, each of which has a multiprocessor to itself: two pieces of each would
    # run one after the other.
    assert choose_splits(132, 32768, 132) == 1
    assert choose_splits(132, 32768, 264) == 2
