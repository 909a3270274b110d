"""Buckets and the limits that every backend refuses to break."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_python_neuronx.backends.base import ModelSpec, Rows, Want
from djl_python_neuronx.backends.shapes import (
    check_rows,
    choose_bucket,
    pad_to_bucket,
)
from djl_python_neuronx.config.values import make_buckets
from djl_python_neuronx.errors import StepError
from tests.doubles.device_driver import make_rows

SPEC = ModelSpec(num_slots=3, max_model_len=16, prefill_buckets=(8,), vocab_size=10)


@given(max_len=st.integers(1, 100_000), smallest=st.integers(1, 2048))
def test_buckets_double_up_to_the_limit(max_len: int, smallest: int) -> None:
    buckets = make_buckets(max_len, smallest)
    assert buckets[-1] == max_len
    assert buckets[0] == min(smallest, max_len)
    assert all(low < high <= 2 * low for low, high in pairwise(buckets))


def test_buckets_are_powers_of_two_by_default() -> None:
    assert make_buckets(2048) == (128, 256, 512, 1024, 2048)
    assert make_buckets(1000) == (128, 256, 512, 1000)
    assert make_buckets(128) == (128,)
    assert make_buckets(100) == (100,)


@pytest.mark.parametrize(("max_len", "smallest"), [(0, 128), (-1, 128), (10, 0)])
def test_buckets_of_no_length_are_refused(max_len: int, smallest: int) -> None:
    with pytest.raises(ValueError, match=rf"from {smallest} to {max_len}"):
        make_buckets(max_len, smallest)


@given(length=st.integers(0, 64), buckets=st.sets(st.integers(1, 64), min_size=1).map(sorted))
def test_the_chosen_bucket_is_the_smallest_that_fits(length: int, buckets: list[int]) -> None:
    fitting = {bucket for bucket in buckets if bucket >= length}
    if fitting:
        assert choose_bucket(length, buckets) == min(fitting)
    else:
        with pytest.raises(ValueError, match=rf"{length} tokens .* {buckets[-1]}"):
            choose_bucket(length, buckets)


def test_padding_goes_to_the_right_and_copies_only_if_it_must() -> None:
    ids = np.array([[1, 2], [3, 4]], np.int32)
    padded = pad_to_bucket(ids, 4)
    assert padded.dtype == np.int32
    assert padded.tolist() == [[1, 2, 0, 0], [3, 4, 0, 0]]
    assert pad_to_bucket(ids, 3, fill=9)[:, 2].tolist() == [9, 9]
    assert pad_to_bucket(ids, 2) is ids
    with pytest.raises(ValueError, match=r"2 columns .* 1"):
        pad_to_bucket(ids, 1)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (make_rows({}), "0 rows.*1 to 3"),
        (make_rows({0: [1], 1: [1], 2: [1], 3: [1]}), "4 rows.*1 to 3"),
        (make_rows({3: [1]}), r"slots \[3\].*0 to 2"),
        (make_rows({-1: [1]}), r"slots \[-1\].*0 to 2"),
        (make_rows({1: [1], 0: [1]}), r"slots \[1, 0\].*ascending"),
        (make_rows({0: [1, 1], 1: []}), r"\[2, 0\] tokens.*1 to 2"),
        (make_rows({0: [1, 1]}, {0: 15}), "15 to 16; expected 0 to 15"),
        (make_rows({0: [1]}, {0: -1}), "-1 to -1; expected 0 to 15"),
        (make_rows({0: [1]}, wants=Want.TOKENS), "TOKENS.*LOGITS"),
    ],
)
def test_what_no_graph_can_run_is_refused_by_name_and_limit(rows: Rows, named: str) -> None:
    with pytest.raises(StepError, match=named):
        check_rows(rows, SPEC)


def test_the_limits_themselves_are_allowed() -> None:
    check_rows(make_rows({0: [1], 1: [1], 2: [1] * 16}), SPEC)
    check_rows(make_rows({2: [1]}, {2: 15}, Want.NOTHING), SPEC)


def test_a_slot_given_twice_is_refused() -> None:
    rows = make_rows({0: [1], 1: [1]})
    rows.slots[1] = 0
    with pytest.raises(StepError, match="ascending"):
        check_rows(rows, SPEC)
