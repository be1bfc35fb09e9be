"""Masks are recognized by evaluating transformers' own mask functions."""

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from octavo.engine.models.checks.masks import FULL, Mask, UnknownMaskError, recognize


def no_padding():
    return torch.zeros(1, dtype=torch.int64)


def test_full():
    assert recognize(causal_mask_function, max_position=131_072) == FULL


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 4096, 100_000])
def test_windows(size):
    function = sliding_window_causal_mask_function(size)
    assert recognize(function, max_position=131_072) == Mask(window=size)


@pytest.mark.parametrize("size", [2, 3, 8, 8192, 100_000])
def test_chunks(size):
    function = chunked_causal_mask_function(size, no_padding())
    assert recognize(function, max_position=131_072) == Mask(chunk=size)


@pytest.mark.parametrize("size", [512, 513])
def test_what_no_sequence_reaches_is_full(size):
    assert recognize(sliding_window_causal_mask_function(size), max_position=512) == FULL
    assert recognize(chunked_causal_mask_function(size, no_padding()), max_position=512) == FULL


def test_a_window_of_the_last_position_is_seen():
    assert recognize(sliding_window_causal_mask_function(511), max_position=512).window == 511


def every_other(batch, head, query, key):
    return (key <= query) & ((query - key) % 2 == 0)


def first_kept(batch, head, query, key):
    return (key <= query) & ((query - key < 16) | (key == 0))


def growing(batch, head, query, key):
    return (key <= query) & (query - key < 8 + query // 64)


def hides_itself(batch, head, query, key):
    return key < query


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (bidirectional_mask_function, "not causal"),
        (or_masks(causal_mask_function, blockwise_overlay(torch.tensor([[0, 0, 1]]))), "depends"),
        (and_masks(causal_mask_function, every_other), "neither"),
        (first_kept, "neither"),
        (growing, "neither"),
        (hides_itself, "itself"),
    ],
)
def test_all_else_is_refused(function, why):
    with pytest.raises(UnknownMaskError, match=why):
        recognize(function, max_position=1024)


def test_functions_that_do_not_broadcast():
    def scalar(batch, head, query, key):
        return torch.where(key <= query, query - key < 5, False)

    assert recognize(scalar, max_position=1024, use_vmap=True) == Mask(window=5)
