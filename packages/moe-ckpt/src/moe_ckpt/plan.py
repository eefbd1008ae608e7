"""Who writes which chunk: computed alike on every rank from what all ranks hold."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moe_ckpt.errors import CoverageError, RankMismatchError
from moe_ckpt.grid import Grid, chunk_shape
from moe_ckpt.pack import PACKS, Member, groups, is_packed

ROUND_BYTES = 64 << 20
"""Fragments that one rank sends or receives at a time; it bounds the memory of an exchange."""


class Piece(NamedTuple):
    """A run of elements in the memory of one rank.

    Attributes:
        start: First flat element of the tensor.
        stop: One past the last.
        rank: Who holds it.
        shard: Which of the shards of that rank.
        at: Where in the memory of the shard the first element is, counted in elements.
    """

    start: int
    stop: int
    rank: int
    shard: int
    at: int = 0


class TensorPlan(NamedTuple):
    """One tensor, wherever in the checkpoint it will stand.

    Attributes:
        name: Of the tensor.
        kind: Of its values.
        dtype: "float32" or "float64".
        shape: Of the whole tensor.
        pieces: What the ranks hold, in order of elements; together every element once.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class ArrayPlan:
    """One array of the checkpoint: that of one tensor, or a pack.

    Attributes:
        name: Of the tensor; "packs" for a pack.
        kind: Of its values; the number of a pack, as five digits.
        dtype: "float32" or "float64".
        grid: Its shape and chunks.
        pieces: What the ranks hold, in order of elements; together every element once.
        members: The tensors in a pack.
    """

    name: str
    kind: str
    dtype: str
    grid: Grid
    pieces: tuple[Piece, ...]
    members: tuple[Member, ...] = ()


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


def plan_tensors(held: Sequence[Sequence[Sequence[Any]]]) -> list[TensorPlan]:
    """Put together what the ranks hold.

    Args:
        held: For each rank, for each of its shards: name, kind, shape, dtype, start, stop.

    Returns:
        The tensors in order of name and kind.

    Raises:
        RankMismatchError: If shards of one tensor differ in shape or dtype.
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
            if start < stop:
                pieces[name, kind].append(Piece(start, stop, rank, shard))
    tensors = []
    for name, kind in sorted(forms):
        shape, dtype, _ = forms[name, kind]
        mine = sorted(pieces[name, kind])
        check_coverage(f"{name}/{kind}", math.prod(shape), mine)
        tensors.append(TensorPlan(name, kind, dtype, shape, tuple(mine)))
    return tensors


def plan_arrays(tensors: Sequence[TensorPlan]) -> list[ArrayPlan]:
    """Return the arrays that hold tensors: their own, in order, and then the packs.

    Args:
        tensors: In order of name and kind.
    """
    small = [tensor for tensor in tensors if is_packed(tensor.shape, tensor.dtype)]
    large = (tensor for tensor in tensors if not is_packed(tensor.shape, tensor.dtype))
    arrays = [
        ArrayPlan(
            t.name, t.kind, t.dtype,
            Grid(t.shape, chunk_shape(t.shape, np.dtype(t.dtype).itemsize)), t.pieces,
        )
        for t in large
    ]  # fmt: skip
    sizes = [(tensor.dtype, math.prod(tensor.shape)) for tensor in small]
    for number, (dtype, group) in enumerate(groups(sizes)):
        arrays.append(_pack(number, dtype, [small[at] for at in group]))
    return arrays


def _pack(number: int, dtype: str, tensors: Sequence[TensorPlan]) -> ArrayPlan:
    pieces, members, at = [], [], 0
    for name, kind, _, shape, mine in tensors:
        stop = at + math.prod(shape)
        members.append(Member(name, kind, shape, at, stop))
        pieces += [Piece(p.start + at, p.stop + at, p.rank, p.shard, p.at) for p in mine]
        at = stop
    grid = Grid((at,), (max(1, at),))
    return ArrayPlan(PACKS, f"{number:05}", dtype, grid, tuple(pieces), tuple(members))


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
            low, high = max(start, piece.start), min(stop, piece.stop)
            held = piece.at + low - piece.start
            parts.append(Piece(low, high, piece.rank, piece.shard, held))
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
