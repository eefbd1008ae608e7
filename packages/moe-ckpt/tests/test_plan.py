"""Coverage is exact, every chunk has one owner that holds a part of it, and work is balanced."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_ckpt import CoverageError, RankMismatchError, save
from moe_ckpt.grid import Grid
from moe_ckpt.plan import (
    ArrayPlan,
    Piece,
    check_coverage,
    plan_arrays,
    plan_chunks,
    plan_tensors,
    rounds,
)
from moe_ckpt.testing import ArrayShard, apart, run_ranks

intervals = st.tuples(st.integers(0, 12), st.integers(1, 12)).map(lambda t: (t[0], sum(t)))


@given(st.integers(0, 14), st.lists(intervals, max_size=5))
def test_coverage_is_refused_exactly_where_an_element_is_not_held_once(size, held) -> None:
    pieces = sorted(Piece(a, min(b, size), r, 0) for r, (a, b) in enumerate(held) if a < size)
    count = np.zeros(size, int)
    for piece in pieces:
        count[piece.start : piece.stop] += 1
    if (count == 1).all():
        check_coverage("w/master", size, pieces)
        return
    first = int(np.flatnonzero(count != 1)[0])
    with pytest.raises(CoverageError, match="w/master") as caught:
        check_coverage("w/master", size, pieces)
    assert f"[{first}, " in str(caught.value)


@st.composite
def plans(draw) -> tuple[int, list[ArrayPlan]]:
    size, arrays = draw(st.integers(1, 4)), []
    for name in "abc":
        rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 5))
        grid = Grid((rows, columns), (draw(st.integers(1, rows)), columns))
        cuts = sorted({0, grid.size, *draw(st.lists(st.integers(0, grid.size), max_size=5))})
        pieces = tuple(
            Piece(a, b, draw(st.integers(0, size - 1)), 0) for a, b in itertools.pairwise(cuts)
        )
        arrays.append(ArrayPlan(name, "master", "float32", grid, pieces))
    return size, arrays


@given(plans(), st.integers(1, 60))
def test_every_chunk_is_written_once_from_its_parts_by_one_that_holds_some(plan, limit) -> None:
    size, arrays = plan
    chunks = plan_chunks(arrays, size)
    where = [(chunk.array, chunk.number) for chunk in chunks]
    assert where == [(a, n) for a, array in enumerate(arrays) for n in range(len(array.grid))]
    for chunk in chunks:
        assert chunk.owner in {piece.rank for piece in chunk.pieces}
        ends = [(piece.start, piece.stop) for piece in chunk.pieces]
        assert (ends[0][0], ends[-1][1]) == arrays[chunk.array].grid.run(chunk.number)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    batches = list(rounds(arrays, chunks, limit))
    assert [chunk for batch in batches for chunk in batch] == chunks
    for batch in batches:
        travels = [c for c in batch if any(p.rank != c.owner for p in c.pieces)]
        for rank in range(size):
            moved = [
                4 * (p.stop - p.start)
                for c in travels
                for p in c.pieces
                if p.rank != c.owner and rank == p.rank
            ]
            assert sum(moved) <= limit or len(travels) == 1


@given(st.integers(2, 8), st.integers(1, 40))
def test_chunks_cut_across_all_ranks_are_shared_out_evenly(size, tensors) -> None:
    # Rank 0 always holds the largest part, and must not get everything for it.
    cuts = [0, *range(size + 5, 2 * size + 5)]
    held = [
        [(f"t{t:02}", "m", [cuts[-1]], "float32", cuts[r], cuts[r + 1]) for t in range(tensors)]
        for r in range(size)
    ]
    with apart():
        chunks = plan_chunks(plan_arrays(plan_tensors(held)), size)
    owned = np.bincount([chunk.owner for chunk in chunks], minlength=size)
    assert owned.max() <= 2 * (tensors / size) + 1


def test_incomplete_and_doubled_shards_are_named_before_anything_is_written(tmp_path) -> None:
    def attempt(shards):
        def program(comm):
            try:
                save(tmp_path, [shards[comm.rank]], step=1, state={}, comm=comm)
            except CoverageError as error:
                return str(error)
            return None

        return run_ranks(2, program)

    def shard(start, stop):
        data = np.zeros(stop - start, np.float32)
        return ArrayShard("layers.0.w", "master", (10,), start, stop, data)

    for shards, interval in [
        ((shard(0, 4), shard(5, 10)), r"[4, 5) is held by no rank"),
        ((shard(0, 6), shard(5, 10)), r"[5, 6) is held by rank 0 and by rank 1"),
        ((shard(0, 5), shard(5, 9)), r"[9, 10) is held by no rank"),
    ]:
        for message in attempt(shards):
            assert "layers.0.w/master" in message
            assert interval in message
    assert not list(tmp_path.iterdir())


def test_ranks_that_disagree_on_a_shape_or_dtype_are_named() -> None:
    row = ["w", "master", [4], "float32", 0, 2]
    with pytest.raises(RankMismatchError, match=r"w/master: rank 0 has .*\(4,\), rank 1 .*\(5,\)"):
        plan_tensors([[row], [["w", "master", [5], "float32", 2, 5]]])
    with pytest.raises(RankMismatchError, match=r"rank 0 has float32 .*, rank 1 has float64"):
        plan_tensors([[row], [["w", "master", [4], "float64", 2, 4]]])
