"""Who writes which chunk: computed alike on every rank from what all ranks hold."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moe_ckpt.errors import CoverageError, RankMismatchError
from moe_ckpt.grid import Grid, chunk_shape

ROUND_BYTES = 64 << 20
"""Fragments that one rank sends or receives at a time; it bounds the memory of an exchange."""


class Piece(NamedTuple):
    """A run of elements in the memory of one rank.

    Attributes:
        start: First flat element of the tensor.
        stop: One past the last.
        rank: Who holds it.
        shard: Which of the shards of that rank.
    """

    start: int
    stop: int
    rank: int
    shard: int


@dataclass(frozen=True)
class ArrayPlan:
    """One array of the checkpoint.

    Attributes:
        name: Of the tensor.
        kind: Of its values.
        dtype: "float32" or "float64".
        grid: Its shape and chunks.
        pieces: What the ranks hold, in order of elements; together every element once.
    """

    name: str
    kind: str
    dtype: str
    grid: Grid
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk and the rank that writes it.

    Attributes:
        array: Index of its array.
        number: Of the chunk in the grid.
        owner: The rank that writes it.
        pieces: The parts it is made of, in order.
    """

    array: int
    number: int
    owner: int
    pieces: tuple[Piece, ...]


def plan_arrays(held: Sequence[Sequence[Sequence[Any]]]) -> list[ArrayPlan]:
    """Put together what the ranks hold.

    Args:
        held: For each rank, for each of its shards: name, kind, shape, dtype, start, stop.

    Returns:
        The arrays in order of name and kind.

    Raises:
        RankMismatchError: If shards of one array differ in shape or dtype.
        CoverageError: If an element is missing or there twice.
    """
    pieces: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    forms: dict[tuple[str, str], tuple[tuple[int, ...], str, int]] = {}
    for rank, shards in enumerate(held):
        for shard, (name, kind, shape, dtype, start, stop) in enumerate(shards):
            form = (tuple(shape), dtype, rank)
            first = forms.setdefault((name, kind), form)
            if form[:2] != first[:2]:
                raise RankMismatchError(
                    f"{name}/{kind}: rank {first[2]} has {first[1]} of shape {first[0]}, "
                    f"rank {rank} has {dtype} of shape {form[0]}"
                )
            pieces[name, kind].append(Piece(start, stop, rank, shard))
    return [_array(*key, *forms[key][:2], pieces[key]) for key in sorted(forms)]


def _array(
    name: str, kind: str, shape: tuple[int, ...], dtype: str, pieces: list[Piece]
) -> ArrayPlan:
    grid = Grid(shape, chunk_shape(shape, np.dtype(dtype).itemsize))
    pieces = sorted(piece for piece in pieces if piece.start < piece.stop)
    check_coverage(f"{name}/{kind}", grid.size, pieces)
    return ArrayPlan(name, kind, dtype, grid, tuple(pieces))


def check_coverage(label: str, size: int, pieces: Sequence[Piece]) -> None:
    """Raise unless the sorted pieces hold each of ``size`` elements exactly once.

    Raises:
        CoverageError: Naming the first three intervals that are missing or held twice.
    """
    faults, at, last = [], 0, -1
    for piece in pieces:
        if piece.start > at:
            faults.append(f"[{at}, {piece.start}) is held by no rank")
        elif piece.start < at:
            twice = f"[{piece.start}, {min(at, piece.stop)})"
            faults.append(f"{twice} is held by rank {last} and by rank {piece.rank}")
        if piece.stop > at:
            at, last = piece.stop, piece.rank
    if at < size:
        faults.append(f"[{at}, {size}) is held by no rank")
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CoverageError(
            f"{label}: the shards must hold each of its {size} elements once, but "
            + "; ".join(faults[:3])
            + more,
            tensor=label,
        )


def plan_chunks(arrays: Sequence[ArrayPlan], size: int) -> list[ChunkPlan]:
    """Give every chunk to one of the ranks that hold a part of it.

    The work of a rank is counted as the bytes it writes plus those it must receive first. Each
    chunk, in order, goes to the rank whose work is then least; the lowest rank wins a tie.

    Args:
        arrays: From ``plan_arrays``.
        size: Number of ranks.
    """
    work, chunks = [0] * size, []
    for index, array in enumerate(arrays):
        itemsize = np.dtype(array.dtype).itemsize
        for number, pieces in _pieces_of_chunks(array):
            held: dict[int, int] = defaultdict(int)
            for piece in pieces:
                held[piece.rank] += piece.stop - piece.start
            length = sum(held.values())
            cost = {rank: (2 * length - mine) * itemsize for rank, mine in held.items()}
            owner = min(cost, key=lambda rank, cost=cost: (work[rank] + cost[rank], rank))
            work[owner] += cost[owner]
            chunks.append(ChunkPlan(index, number, owner, pieces))
    return chunks


def _pieces_of_chunks(array: ArrayPlan) -> Iterator[tuple[int, tuple[Piece, ...]]]:
    first = 0
    for number in range(len(array.grid)):
        start, stop = array.grid.run(number)
        while array.pieces[first].stop <= start:
            first += 1
        parts, at = [], first
        while at < len(array.pieces) and array.pieces[at].start < stop:
            piece = array.pieces[at]
            parts.append(piece._replace(start=max(start, piece.start), stop=min(stop, piece.stop)))
            at += 1
        yield number, tuple(parts)


def rounds(
    arrays: Sequence[ArrayPlan], chunks: Sequence[ChunkPlan], limit: int = ROUND_BYTES
) -> Iterator[list[ChunkPlan]]:
    """Split the chunks into runs in which no rank sends or receives more than ``limit`` bytes.

    A single chunk may exceed it.
    """
    batch: list[ChunkPlan] = []
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for chunk in chunks:
        itemsize = np.dtype(arrays[chunk.array].dtype).itemsize
        travel = [p for p in chunk.pieces if p.rank != chunk.owner]
        for piece in travel:
            sent[piece.rank] += (piece.stop - piece.start) * itemsize
            received[chunk.owner] += (piece.stop - piece.start) * itemsize
        full = max([*sent.values(), *received.values()], default=0) > limit
        if batch and travel and full:
            yield batch
            batch = []
            sent.clear()
            received.clear()
            for piece in travel:
                sent[piece.rank] += (piece.stop - piece.start) * itemsize
                received[chunk.owner] += (piece.stop - piece.start) * itemsize
        batch.append(chunk)
    if batch:
        yield batch
