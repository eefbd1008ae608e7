"""From the shards of all ranks to chunks: fragments travel to their owner, who writes them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe_ckpt.array import ArrayInfo, ChunkWriter
from moe_ckpt.chunks import chunk_writer
from moe_ckpt.comm import Together
from moe_ckpt.errors import CheckpointError, PeerStoppedError
from moe_ckpt.object_chunks import ObjectWriter
from moe_ckpt.objects import ObjectPath, Place
from moe_ckpt.pack import digests
from moe_ckpt.plan import ArrayPlan, ChunkPlan, rounds
from moe_ckpt.shard import View


class Written(NamedTuple):
    """What is known of the chunks once they have been written.

    Attributes:
        crcs: CRC-32C of every chunk, by index of its array and its number.
        digests: Of the members of every pack, by index of its array.
    """

    crcs: dict[tuple[int, int], int]
    digests: dict[int, list[str]]


def infos_of(arrays: Sequence[ArrayPlan], written: Written | None = None) -> list[ArrayInfo]:
    """Return the arrays as the checkpoint will describe them, before or after the save."""
    infos = []
    for index, array in enumerate(arrays):
        crcs, members = np.empty(0, np.uint32), array.members
        if written is not None:
            mine = [written.crcs[index, number] for number in range(len(array.grid))]
            crcs = np.array(mine, np.uint32)
            # A pack of nothing but empty tensors has no chunk, and nobody wrote it.
            found = written.digests.get(index) or digests(members, np.empty(0, array.dtype))
            members = tuple(
                member._replace(digest=of) for member, of in zip(members, found, strict=True)
            )
        infos.append(ArrayInfo(array.name, array.kind, array.dtype, array.grid, crcs, members))
    return infos


def write_chunks(
    together: Together,
    staging: Place,
    views: Sequence[View],
    arrays: Sequence[ArrayPlan],
    chunks: Sequence[ChunkPlan],
) -> Written:
    """Write the chunks of every rank and return what is known of all of them.

    Args:
        together: The ranks.
        staging: Where.
        views: What this rank holds.
        arrays: From ``plan_arrays``.
        chunks: From ``plan_chunks``.
    """
    rank, infos, mine = together.comm.rank, infos_of(arrays), Written({}, {})
    together.attempt(_check_shared, staging)
    sizes = [infos[chunk.array].chunk_bytes for chunk in chunks if chunk.owner == rank]
    writer = chunk_writer(staging, sizes)
    for batch in rounds(arrays, chunks):
        parcels = _exchange(together, views, batch)
        owned = [chunk for chunk in batch if chunk.owner == rank]
        together.attempt(_write_round, writer, views, infos, owned, parcels, mine)
        together.attempt(_stored_crcs, writer, infos, owned, mine)
        together.agree()
    together.attempt(writer.finish)
    crcs = [[*key, crc] for key, crc in mine.crcs.items()]
    replies = together.agree([crcs, list(mine.digests.items())])
    return Written(
        {(index, number): crc for reply, _ in replies for index, number, crc in reply},
        {index: found for _, reply in replies for index, found in reply},
    )


def _check_shared(staging: Place) -> None:
    # In an object store what shows a save to other ranks is one object, with or without arrays.
    if isinstance(staging, ObjectPath):
        shared = (staging.parent.parent / "begun" / staging.name).is_file()
    else:
        shared = (staging / "arrays").is_dir()
    if not shared:
        raise CheckpointError(
            f"{staging}, made by rank 0, is not visible here: all ranks must see one file system"
        )


def _exchange(
    together: Together, views: Sequence[View], batch: Sequence[ChunkPlan]
) -> list[memoryview]:
    """Send the fragments of chunks that others own; return, for each rank, what it sent."""
    comm = together.comm
    if all(piece.rank == chunk.owner for chunk in batch for piece in chunk.pieces):
        return [memoryview(b"")] * comm.size
    parcels = together.attempt(_parcels, comm.rank, comm.size, views, batch)
    received = comm.exchange(parcels or [b""] * comm.size)
    return [memoryview(parcel) for parcel in received]


def _parcels(
    rank: int, size: int, views: Sequence[View], batch: Sequence[ChunkPlan]
) -> list[bytes]:
    parts: list[list[np.ndarray]] = [[] for _ in range(size)]
    for chunk in batch:
        for start, stop, holder, shard, at in chunk.pieces:
            if holder == rank != chunk.owner:
                parts[chunk.owner].append(views[shard].data[at : at + stop - start])
    return [b"".join(part.tobytes() for part in part_list) for part_list in parts]


def _write_round(
    writer: ChunkWriter | ObjectWriter,
    views: Sequence[View],
    infos: Sequence[ArrayInfo],
    owned: Sequence[ChunkPlan],
    parcels: list[memoryview],
    found: Written,
) -> None:
    try:
        for chunk in owned:
            info = infos[chunk.array]
            values = _assemble(views, info, chunk, parcels)
            writer.write(info, chunk.number, values)
            if info.members:
                found.digests[chunk.array] = digests(info.members, values)
        writer.wait()
    except BaseException:
        writer.drain()
        raise


def _assemble(
    views: Sequence[View], info: ArrayInfo, chunk: ChunkPlan, parcels: list[memoryview]
) -> np.ndarray:
    first, last = info.grid.run(chunk.number)
    if len(chunk.pieces) == 1:  # nearly all bytes: written from the memory of the caller
        [piece] = chunk.pieces
        return views[piece.shard].data[piece.at : piece.at + last - first]
    values = np.empty(last - first, info.dtype)
    for start, stop, rank, shard, at in chunk.pieces:
        part = values[start - first : stop - first]
        if rank == chunk.owner:
            part[:] = views[shard].data[at : at + stop - start]
            continue
        parcel = parcels[rank]
        if len(parcel) < part.nbytes:
            raise PeerStoppedError(f"rank {rank} sent no part of {info.name}/{info.kind}")
        part[:] = np.frombuffer(parcel[: part.nbytes], info.dtype)
        parcels[rank] = parcel[part.nbytes :]
    return values


def _stored_crcs(
    writer: ChunkWriter | ObjectWriter,
    infos: Sequence[ArrayInfo],
    owned: Sequence[ChunkPlan],
    found: Written,
) -> None:
    for chunk in owned:
        crc = writer.stored_crc(infos[chunk.array], chunk.number)
        found.crcs[chunk.array, chunk.number] = crc
