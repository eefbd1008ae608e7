"""The tensors of a checkpoint and the arrays that hold them, as the manifest describes them."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_ckpt.array import ArrayInfo
from moe_ckpt.grid import Grid
from moe_ckpt.pack import PACKS, Member
from moe_ckpt.shard import DTYPES, check_name


class TensorInfo(NamedTuple):
    """What a checkpoint says about one tensor.

    Attributes:
        name: Of the tensor.
        kind: Of its values.
        dtype: "float32" or "float64".
        shape: Of the whole tensor.
        array: That holds it: its own, or a pack.
        start: Its first element there.
        size: Number of its elements.
        digest: SHA-256 that tells its values: in a pack of their bytes, else of the checksums of
            its chunks.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    array: ArrayInfo
    start: int
    size: int
    digest: str

    @property
    def label(self) -> str:
        """``name/kind``."""
        return f"{self.name}/{self.kind}"

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def packed(self) -> bool:
        """Whether a pack holds it."""
        return bool(self.array.members)

    @property
    def numbers(self) -> list[int]:
        """The chunks of the array that hold it."""
        return list(self.array.grid.overlapping(self.start, self.start + self.size))


def digest(crcs: np.ndarray) -> str:
    """Return what tells the values of an array in chunks of a given shape."""
    return hashlib.sha256(crcs.astype("<u4").tobytes()).hexdigest()


def rows_of(info: ArrayInfo) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, kind and description of every tensor in an array."""
    if not info.members:
        row = {
            "chunk": info.grid.chunk, "digest": digest(info.crcs), "dtype": info.dtype,
            "kind": info.kind, "name": info.name, "shape": info.grid.shape,
        }  # fmt: skip
        yield info.name, info.kind, row
    for name, kind, shape, start, _, of in info.members:
        row = {
            "digest": of, "dtype": info.dtype, "kind": kind, "name": name,
            "pack": int(info.kind), "shape": shape, "start": start,
        }  # fmt: skip
        yield name, kind, row


def pack_row(info: ArrayInfo) -> dict[str, Any]:
    """Return the description of a pack."""
    return {"dtype": info.dtype, "elements": info.grid.size}


def read_rows(
    rows: Sequence[dict[str, Any]], packs: Sequence[dict[str, Any]], crcs: np.ndarray
) -> tuple[tuple[TensorInfo, ...], tuple[ArrayInfo, ...]]:
    """Return the tensors that rows describe and the arrays that hold them.

    Args:
        rows: Of the tensors, in order of name and kind.
        packs: Of the packs.
        crcs: Of all chunks, in order of the arrays.

    Raises:
        ValueError: If they contradict each other.
        KeyError: If a row lacks something.
    """
    own, members, at = {}, [[] for _ in packs], 0
    for number, row in enumerate(rows):
        check_name(row["name"], "name")
        check_name(row["kind"], "kind")
        if "pack" in row:
            members[row["pack"]].append(_member(row, packs[row["pack"]]))
            continue
        if row["dtype"] not in DTYPES:
            raise ValueError(f"dtype {row['dtype']!r}")
        grid = Grid(tuple(row["shape"]), tuple(row["chunk"]))
        mine, at = crcs[at : at + len(grid)], at + len(grid)
        if len(mine) != len(grid) or digest(mine) != row["digest"]:
            raise ValueError(f"the checksums of {row['name']}/{row['kind']}")
        own[number] = ArrayInfo(row["name"], row["kind"], row["dtype"], grid, mine)
    shared = []
    for number, (row, inside) in enumerate(zip(packs, members, strict=True)):
        info = _pack(number, row, inside, crcs[at:])
        at += len(info.crcs)
        shared.append(info)
    if at != len(crcs):
        raise ValueError(f"{len(crcs)} checksums for {at} chunks")
    tensors = [_tensor(row, own.get(number), shared) for number, row in enumerate(rows)]
    return tuple(tensors), (*own.values(), *shared)


def _member(row: dict[str, Any], pack: dict[str, Any]) -> Member:
    shape, start = tuple(row["shape"]), row["start"]
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {shape}")
    if row["dtype"] != pack["dtype"] or row["pack"] < 0:
        raise ValueError(f"{row['name']}/{row['kind']} is {row['dtype']} in pack {row['pack']}")
    stop = start + math.prod(shape)
    return Member(row["name"], row["kind"], shape, start, stop, row["digest"])


def _pack(
    number: int, row: dict[str, Any], members: Sequence[Member], crcs: np.ndarray
) -> ArrayInfo:
    if row["dtype"] not in DTYPES:
        raise ValueError(f"dtype {row['dtype']!r}")
    at, elements = 0, row["elements"]
    for member in members:
        if member.start != at or member.stop < at:
            raise ValueError(f"pack {number}: {member.name}/{member.kind} begins at {member.start}")
        at = member.stop
    if at != elements or not members:
        raise ValueError(f"pack {number} of {elements} elements, {at} of them in its tensors")
    grid = Grid((elements,), (max(1, elements),))
    mine = crcs[: len(grid)]
    if len(mine) != len(grid):
        raise ValueError(f"no checksum of pack {number}")
    return ArrayInfo(PACKS, f"{number:05}", row["dtype"], grid, mine, tuple(members))


def _tensor(row: dict[str, Any], own: ArrayInfo | None, packs: Sequence[ArrayInfo]) -> TensorInfo:
    shape = tuple(row["shape"])
    array, start = (packs[row["pack"]], row["start"]) if own is None else (own, 0)
    size = math.prod(shape)
    return TensorInfo(
        row["name"], row["kind"], row["dtype"], shape, array, start, size, row["digest"]
    )
