"""Chunks are runs of the elements, tile them in order, and follow from the shape alone."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_ckpt.grid import LOWER_BYTES, UPPER_BYTES, Grid, chunk_shape

MIB = 1 << 20


@st.composite
def grids(draw) -> Grid:
    shape = draw(st.lists(st.integers(0, 7), max_size=4).map(tuple))
    axis = draw(st.integers(0, max(0, len(shape) - 1)))
    chunk = [1] * min(axis, len(shape)) + [max(1, n) for n in shape[axis:]]
    if shape:
        chunk[axis] = draw(st.integers(1, max(1, shape[axis])))
    return Grid(shape, tuple(chunk))


@given(grids())
def test_chunks_tile_the_elements_in_order(grid) -> None:
    flat = np.arange(grid.size).reshape(grid.shape)
    parts = [flat[grid.box(number)].reshape(-1) for number in range(len(grid))]
    for number, part in enumerate(parts):
        start, stop = grid.run(number)
        np.testing.assert_array_equal(part, np.arange(start, stop))
        assert grid.number(grid.index(number)) == number
    np.testing.assert_array_equal(np.concatenate([[], *parts]), np.arange(grid.size))


@given(grids(), st.data())
def test_overlapping_finds_the_chunks_that_hold_any_of_the_elements(grid, data) -> None:
    start = data.draw(st.integers(0, grid.size))
    stop = data.draw(st.integers(start, grid.size))
    want = [n for n in range(len(grid)) if max(start, grid.run(n)[0]) < min(stop, grid.run(n)[1])]
    assert list(grid.overlapping(start, stop)) == want


@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 7, 60, 64, 61, 384, 1000, 4096, 50_257]), max_size=4),
    st.sampled_from([4, 8]),
)
def test_chunk_sizes_stay_between_the_bounds(shape, itemsize) -> None:
    chunk = chunk_shape(tuple(shape), itemsize)
    Grid(tuple(shape), chunk)  # raises unless chunks are runs
    nbytes, whole = math.prod(chunk) * itemsize, math.prod(max(1, n) for n in shape) * itemsize
    assert nbytes <= UPPER_BYTES or nbytes == itemsize
    assert nbytes >= min(whole, LOWER_BYTES)


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((128, 2048, 1024), (1, 2048, 1024)),  # one expert is 8 MiB
        ((128, 8192, 1024), (1, 4096, 1024)),  # one expert is 32 MiB
        ((60, 512, 512), (4, 512, 512)),
        ((48, 100, 100), (48, 100, 100)),
        ((1024, 4096), (1024, 4096)),
        ((1025, 4096), (513, 4096)),
        ((10_000_000,), (3_333_334,)),
        ((2, 3, 5_000_000), (1, 1, 2_500_000)),
    ],
)
def test_the_rule_that_the_format_documents(shape, want) -> None:
    assert chunk_shape(shape, 4) == want


@pytest.mark.parametrize(("shape", "chunk"), [((4, 4), (2, 2)), ((4,), (0,)), ((4,), (4, 1))])
def test_chunks_that_are_not_runs_are_refused(shape, chunk) -> None:
    with pytest.raises(ValueError, match="chunk"):
        Grid(shape, chunk)


def test_whole_chunks_of_bounds() -> None:
    assert (LOWER_BYTES, UPPER_BYTES) == (4 * MIB, 16 * MIB)
