"""Save: plan, exchange fragments, write chunks, commit. All ranks or none."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_ckpt import commit, object_commit
from moe_ckpt.array import ArrayInfo, ChunkWriter
from moe_ckpt.chunks import chunk_writer
from moe_ckpt.comm import Alone, Communicator, Together
from moe_ckpt.errors import CheckpointError, PeerStoppedError, RankMismatchError, StateError
from moe_ckpt.manifest import state_bytes
from moe_ckpt.object_chunks import ObjectWriter
from moe_ckpt.objects import ObjectPath, Place, as_place
from moe_ckpt.plan import ArrayPlan, ChunkPlan, plan_arrays, plan_chunks, rounds
from moe_ckpt.progress import no_progress
from moe_ckpt.shard import Shard, View, view_of


def save(
    root: str | Place,
    shards: Iterable[Shard],
    *,
    step: int,
    state: Mapping[str, Any],
    comm: Communicator | None = None,
    keep: int | None = 2,
    overwrite: bool = False,
) -> Place:
    """Save what all ranks hold as one checkpoint that knows nothing of the ranks.

    Every rank calls it with its own shards and the same other arguments. When it returns, the
    checkpoint is on disk; when it raises, it raises on every rank and no reader sees any change.
    The memory of the shards must not change meanwhile.

    Cost: each byte is written once and made durable. What travels between ranks are the parts of
    chunks that lie on more than one rank, in rounds of at most 64 MiB a rank.

    Args:
        root: Directory of the run, on a file system that all ranks share; made if missing.
        shards: What this rank holds. Over all ranks each element of each tensor occurs once.
        step: At least 0.
        state: Everything else, as JSON: counters, data cursor, seeds, configuration. That of
            rank 0 is saved; the others must have the same keys, since what only they know would
            be lost.
        comm: The ranks that save together; by default this process alone.
        keep: How many of the newest checkpoints stay, this one included; None keeps all. Damaged
            ones are neither counted nor deleted.
        overwrite: Whether a checkpoint of this step may be replaced.

    Returns:
        The directory of the checkpoint.

    Raises:
        ShardError: If a shard cannot be saved.
        CoverageError: If an element is missing or there twice, before anything is written.
        StateError: If the state is not JSON or has other keys on another rank.
        RankMismatchError: If another argument differs.
        StepExistsError: If the step is there and ``overwrite`` is false.
        RootLockedError: If another process is saving to the root.
        RankFailedError: If anything else went wrong, such as a full disk.
    """
    together = Together(comm or Alone())
    call = together.attempt(_call, shards, step, state, keep, overwrite)
    return save_views(together, root, call)


@dataclass(frozen=True)
class Call:
    """What one rank asks to be saved.

    Attributes:
        views: What it holds.
        step: Of the run.
        state: Of the caller.
        keep: How many checkpoints stay.
        overwrite: Whether one of this step may be replaced.
    """

    views: Sequence[View]
    step: int
    state: Mapping[str, Any]
    keep: int | None
    overwrite: bool

    def check(self) -> None:
        """Raise if no rank could be asked this.

        Raises:
            RankMismatchError: If a number is too small.
        """
        if operator.index(self.step) < 0:
            raise RankMismatchError(f"step must be at least 0, it is {self.step}")
        if self.keep is not None and self.keep < 1:
            raise RankMismatchError(f"keep must be at least 1 or None, it is {self.keep}")

    def describe(self) -> dict[str, Any]:
        """Return as JSON what the ranks have to know of each other."""
        return {
            "step": operator.index(self.step),
            "keep": self.keep,
            "overwrite": self.overwrite,
            "state": list(self.state),
            "shards": [view.describe() for view in self.views],
        }


def _call(
    shards: Iterable[Shard],
    step: int,
    state: Mapping[str, Any],
    keep: int | None,
    overwrite: bool,
) -> Call:
    call = Call([view_of(shard) for shard in shards], step, state, keep, overwrite)
    call.check()
    return call


def save_views(together: Together, root: str | Place, call: Call | None) -> Place:
    """Save what all ranks ask for, or raise on all of them.

    Args:
        together: The ranks; this one may have failed already.
        root: Directory of the run.
        call: Of this rank; None if it has failed.
    """
    data = None if call is None else together.attempt(state_bytes, call.state)
    calls = together.agree(None if call is None else call.describe())
    _check_same(calls)
    assert call is not None  # or agree would have raised
    assert data is not None
    arrays = plan_arrays([c["shards"] for c in calls])
    chunks = plan_chunks(arrays, together.comm.size)
    root, step = as_place(root), calls[0]["step"]
    protocol: Any = object_commit if isinstance(root, ObjectPath) else commit
    infos = _infos(arrays, {})
    with ExitStack() as stack:
        staging = together.on_first(protocol.open_staging, stack, root, step, infos, call.overwrite)
        # Each rank under its own root: nodes may mount one file system in different places.
        crcs = _write(together, root / staging, call.views, arrays, chunks)
        final = _infos(arrays, crcs)
        name = together.on_first(
            lambda: _below(root, protocol.commit(root, root / staging, step, final, data))
        )
        if together.comm.rank == 0 and call.keep is not None:
            protocol.retire(root, call.keep)
    return root / name


def _below(root: Place, place: Any) -> str:
    return str(place.relative_to(root))


def save_arrays(
    root: str | Place,
    arrays: Sequence[ArrayPlan],
    produce: Callable[[ArrayPlan, int, int], np.ndarray],
    *,
    step: int,
    state: Mapping[str, Any],
    keep: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = no_progress,
) -> Place:
    """Save what is made as it is written, a chunk at a time; one process, and no shards.

    Args:
        root: As for ``save``.
        arrays: To save, in order of name and kind; what ranks hold of them is not looked at.
        produce: Returns the flat elements of an array from a first one to before another.
        step: As for ``save``.
        state: As for ``save``.
        keep: As for ``save``.
        overwrite: As for ``save``.
        progress: Is called with the bytes done and the bytes in all.
    """
    Call([], step, state, keep, overwrite).check()
    root, data, infos = as_place(root), state_bytes(state), _infos(arrays, {})
    protocol: Any = object_commit if isinstance(root, ObjectPath) else commit
    total = sum(a.grid.size * np.dtype(a.dtype).itemsize for a in arrays)
    done, crcs = 0, {}
    with ExitStack() as stack:
        name = protocol.open_staging(stack, root, step, infos, overwrite)
        sizes = [info.chunk_bytes for info in infos for _ in range(len(info.grid))]
        writer = chunk_writer(root / name, sizes)
        try:
            for index, array in enumerate(arrays):
                for number in range(len(array.grid)):
                    values = produce(array, *array.grid.run(number))
                    writer.write(infos[index], number, values)
                    done += values.nbytes
                    progress(done, total)
                writer.wait()
                for number in range(len(array.grid)):
                    crcs[index, number] = writer.stored_crc(infos[index], number)
            writer.finish()
        except BaseException:
            writer.drain()
            raise
        path = protocol.commit(root, root / name, step, _infos(arrays, crcs), data)
        if keep is not None:
            protocol.retire(root, keep)
    return path


def _check_same(calls: Sequence[dict[str, Any]]) -> None:
    for rank, call in enumerate(calls):
        for what in ("step", "keep", "overwrite"):
            if call[what] != calls[0][what]:
                raise RankMismatchError(
                    f"{what} is {calls[0][what]} on rank 0 and {call[what]} on rank {rank}"
                )
        if differing := sorted(set(call["state"]) ^ set(calls[0]["state"])):
            raise StateError(f"state has {differing} on one of rank 0 and rank {rank} only")


def _infos(arrays: Sequence[ArrayPlan], crcs: Mapping[tuple[int, int], int]) -> list[ArrayInfo]:
    infos = []
    for index, array in enumerate(arrays):
        mine = [crcs[index, number] for number in range(len(array.grid))] if crcs else []
        checksums = np.array(mine, np.uint32)
        infos.append(ArrayInfo(array.name, array.kind, array.dtype, array.grid, checksums))
    return infos


def _write(
    together: Together,
    staging: Place,
    views: Sequence[View],
    arrays: Sequence[ArrayPlan],
    chunks: Sequence[ChunkPlan],
) -> dict[tuple[int, int], int]:
    """Write the chunks of every rank and return the checksums of all, by array and number."""
    rank, infos, crcs = together.comm.rank, _infos(arrays, {}), []
    together.attempt(_check_shared, staging)
    sizes = [infos[chunk.array].chunk_bytes for chunk in chunks if chunk.owner == rank]
    writer = chunk_writer(staging, sizes)
    for batch in rounds(arrays, chunks):
        parcels = _exchange(together, views, batch)
        mine = [chunk for chunk in batch if chunk.owner == rank]
        together.attempt(_write_round, writer, views, infos, mine, parcels)
        crcs += together.attempt(_stored_crcs, writer, infos, mine) or []
        together.agree()
    together.attempt(writer.finish)
    replies = together.agree(crcs)
    return {(index, number): crc for reply in replies for index, number, crc in reply}


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
        for piece in chunk.pieces:
            if piece.rank == rank != chunk.owner:
                view = views[piece.shard]
                parts[chunk.owner].append(
                    view.data[piece.start - view.start : piece.stop - view.start]
                )
    return [b"".join(part.tobytes() for part in part_list) for part_list in parts]


def _write_round(
    writer: ChunkWriter | ObjectWriter,
    views: Sequence[View],
    infos: Sequence[ArrayInfo],
    mine: Sequence[ChunkPlan],
    parcels: list[memoryview],
) -> None:
    try:
        for chunk in mine:
            info = infos[chunk.array]
            writer.write(info, chunk.number, _assemble(views, info, chunk, parcels))
        writer.wait()
    except BaseException:
        writer.drain()
        raise


def _assemble(
    views: Sequence[View], info: ArrayInfo, chunk: ChunkPlan, parcels: list[memoryview]
) -> np.ndarray:
    start, stop = info.grid.run(chunk.number)
    first = chunk.pieces[0]
    if len(chunk.pieces) == 1:  # nearly all bytes: written from the memory of the caller
        view = views[first.shard]
        return view.data[start - view.start : stop - view.start]
    values = np.empty(stop - start, info.dtype)
    for piece in chunk.pieces:
        part = values[piece.start - start : piece.stop - start]
        if piece.rank == chunk.owner:
            view = views[piece.shard]
            part[:] = view.data[piece.start - view.start : piece.stop - view.start]
            continue
        parcel = parcels[piece.rank]
        if len(parcel) < part.nbytes:
            raise PeerStoppedError(f"rank {piece.rank} sent no part of {info.name}/{info.kind}")
        part[:] = np.frombuffer(parcel[: part.nbytes], info.dtype)
        parcels[piece.rank] = parcel[part.nbytes :]
    return values


def _stored_crcs(
    writer: ChunkWriter | ObjectWriter, infos: Sequence[ArrayInfo], mine: Sequence[ChunkPlan]
) -> list[tuple[int, int, int]]:
    return [(c.array, c.number, writer.stored_crc(infos[c.array], c.number)) for c in mine]
