"""Save: plan, exchange fragments, write chunks, commit. All ranks or none."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_ckpt import commit, object_commit
from moe_ckpt.array import ArrayInfo
from moe_ckpt.assembly import Written, infos_of, write_chunks
from moe_ckpt.chunks import chunk_writer
from moe_ckpt.comm import Alone, Communicator, Together
from moe_ckpt.errors import RankMismatchError, StateError
from moe_ckpt.manifest import state_bytes
from moe_ckpt.objects import ObjectPath, Place, as_place
from moe_ckpt.pack import digests
from moe_ckpt.plan import TensorPlan, plan_arrays, plan_chunks, plan_tensors
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
    arrays = plan_arrays(plan_tensors([c["shards"] for c in calls]))
    chunks = plan_chunks(arrays, together.comm.size)
    root, step = as_place(root), calls[0]["step"]
    protocol: Any = object_commit if isinstance(root, ObjectPath) else commit
    infos = infos_of(arrays)
    with ExitStack() as stack:
        staging = together.on_first(protocol.open_staging, stack, root, step, infos, call.overwrite)
        # Each rank under its own root: nodes may mount one file system in different places.
        written = write_chunks(together, root / staging, call.views, arrays, chunks)
        final = infos_of(arrays, written)
        name = together.on_first(
            lambda: _below(root, protocol.commit(root, root / staging, step, final, data))
        )
        if together.comm.rank == 0 and call.keep is not None:
            protocol.retire(root, call.keep)
    return root / name


def _below(root: Place, place: Any) -> str:
    return str(place.relative_to(root))


def save_made(
    root: str | Place,
    tensors: Sequence[TensorPlan],
    produce: Callable[[str, str, int, int], np.ndarray],
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
        tensors: To save, in order of name and kind; what ranks hold of them is not looked at.
        produce: Returns the flat elements of the tensor of a name and kind, from a first one to
            before another.
        step: As for ``save``.
        state: As for ``save``.
        keep: As for ``save``.
        overwrite: As for ``save``.
        progress: Is called with the bytes done and the bytes in all.
    """
    Call([], step, state, keep, overwrite).check()
    arrays = plan_arrays(tensors)
    root, data, infos = as_place(root), state_bytes(state), infos_of(arrays)
    protocol: Any = object_commit if isinstance(root, ObjectPath) else commit
    total = sum(a.grid.size * np.dtype(a.dtype).itemsize for a in arrays)
    done, written = 0, Written({}, {})
    with ExitStack() as stack:
        name = protocol.open_staging(stack, root, step, infos, overwrite)
        sizes = [info.chunk_bytes for info in infos for _ in range(len(info.grid))]
        writer = chunk_writer(root / name, sizes)
        try:
            for index, info in enumerate(infos):
                for number in range(len(info.grid)):
                    values = _made(info, number, produce)
                    writer.write(info, number, values)
                    if info.members:
                        written.digests[index] = digests(info.members, values)
                    done += values.nbytes
                    progress(done, total)
                writer.wait()
                for number in range(len(info.grid)):
                    written.crcs[index, number] = writer.stored_crc(info, number)
            writer.finish()
        except BaseException:
            writer.drain()
            raise
        path = protocol.commit(root, root / name, step, infos_of(arrays, written), data)
        if keep is not None:
            protocol.retire(root, keep)
    return path


def _made(
    info: ArrayInfo, number: int, produce: Callable[[str, str, int, int], np.ndarray]
) -> np.ndarray:
    if not info.members:
        return produce(info.name, info.kind, *info.grid.run(number))
    return np.concatenate([produce(m.name, m.kind, 0, m.stop - m.start) for m in info.members])


def _check_same(calls: Sequence[dict[str, Any]]) -> None:
    for rank, call in enumerate(calls):
        for what in ("step", "keep", "overwrite"):
            if call[what] != calls[0][what]:
                raise RankMismatchError(
                    f"{what} is {calls[0][what]} on rank 0 and {call[what]} on rank {rank}"
                )
        if differing := sorted(set(call["state"]) ^ set(calls[0]["state"])):
            raise StateError(f"state has {differing} on one of rank 0 and rank {rank} only")
