"""How many pieces long sequences are cut into."""

import pytest

pytest.importorskip("triton")

from kernels.triton.splits import LEAST_KEYS, MAX_SPLITS, choose_splits
from kernels.triton.tiles import RESIDENT

H100 = 132


@pytest.mark.parametrize("programs", [1, 8, 32, 128, 264, 512, 2048])
@pytest.mark.parametrize("longest", [0, 1, 255, 2048, 32768, 131072])
def test_pieces_are_worth_their_while(programs, longest):
    splits = choose_splits(programs, longest, H100)
    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or longest / splits >= LEAST_KEYS


@pytest.mark.parametrize("programs", [4, 8, 32, 100, 128, 265, 400])
def test_long_sequences_keep_the_whole_gpu_busy(programs):
    places = RESIDENT * H100
    run = programs * choose_splits(programs, 32768, H100)
    assert run >= 0.85 * -(-run // places) * places


@pytest.mark.parametrize("programs", [264, 512, 2048])
def test_enough_sequences_are_not_cut(programs):
    assert choose_splits(programs, 2048, H100) == 1
