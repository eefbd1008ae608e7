"""How a save becomes a checkpoint where nothing can be renamed: by one small object, written last.

    commits/step-00001200        exists if and only if the checkpoint does; names its data
    data/step-00001200.NONCE/    as the directory of a checkpoint on a file system
    begun/step-00001200.NONCE    this data may be incomplete, or is being deleted

No two saves share a name in ``data``, so what a dead process still sends cannot reach a later
checkpoint, and replacing a checkpoint is replacing one object. ``begun`` is written before the
first object of the data and removed after the commit, so leftovers are found without listing data.
"""

import json
import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from moe_ckpt.array import ArrayInfo, metadata_bytes
from moe_ckpt.catalog import LATEST, commit_of, scan
from moe_ckpt.errors import CheckpointError, StepExistsError
from moe_ckpt.lease import Lease, check_held
from moe_ckpt.manifest import MANIFEST, sha256, small_files, to_json
from moe_ckpt.objects import ObjectPath

logger = logging.getLogger(__name__)


def open_staging(
    stack: ExitStack, root: ObjectPath, step: int, infos: Sequence[ArrayInfo], overwrite: bool
) -> str:
    """Take the lease of the root and make a place for a save, which goes when the stack is closed.

    Returns:
        Where it is, below the root.

    Raises:
        StepExistsError: If the step is there and ``overwrite`` is false.
        RootLockedError: If another process is saving to the root.
    """
    nonce = uuid.uuid4().hex
    stack.enter_context(Lease(root, step, nonce))
    for leftover in scan(root).leftovers:
        logger.warning("removed %s, left by a save that did not end", leftover)
        discard(root, leftover.name)
    if commit_of(root, step).is_file() and not overwrite:
        there = commit_of(root, step)
        raise StepExistsError(f"{there} is there already; overwrite=True replaces it")
    name = f"step-{step:08d}.{nonce}"
    (root / "begun" / name).write_bytes(b"")
    stack.callback(_abandon, root, step, name)
    staging = root / "data" / name
    for info in infos:
        (info.directory(staging) / "zarr.json").write_bytes(metadata_bytes(info))
    return f"data/{name}"


def commit(
    root: ObjectPath, staging: ObjectPath, step: int, infos: list[ArrayInfo], state: bytes
) -> ObjectPath:
    """Make complete data the newest checkpoint. Runs on rank 0, under the lease."""
    others = [c.sequence for c in scan(root).valid if c.step != step]
    contents = small_files(step, 1 + max(others, default=-1), infos, state)
    for name, data in contents.items():
        (staging / name).write_bytes(data)
    check_held(root, staging.name.rpartition(".")[2])
    seal = sha256(contents[MANIFEST])
    place, latest = commit_of(root, step), root / LATEST
    before = {p: p.read_bytes() if p.is_file() else None for p in (place, latest)}
    old = _data_of(before[place])
    if old is not None:  # so that it is found if this process dies before it can delete it
        (root / "begun" / old).write_bytes(b"")
    try:
        place.write_bytes(to_json({"data": staging.name, "manifest_sha256": seal}))
        latest.write_bytes(to_json({"step": step, "manifest_sha256": seal}))
    except BaseException:
        for at, data in before.items():
            if data is None:
                at.unlink()
            else:
                at.write_bytes(data)
        raise
    # It stands. Nothing from here on may raise on rank 0 alone.
    _quietly(_settle, root, staging.name, old)
    return staging


def _data_of(commit: bytes | None) -> str | None:
    try:
        return None if commit is None else str(json.loads(commit)["data"])
    except (ValueError, KeyError, TypeError):
        return None  # damaged: nobody knows what it committed


def _settle(root: ObjectPath, name: str, old: str | None) -> None:
    if old is not None:
        discard(root, old)
    (root / "begun" / name).unlink()


def retire(root: ObjectPath, keep: int) -> None:
    """Delete all but the newest checkpoints. What cannot be deleted is logged."""

    def work() -> None:
        for checkpoint in scan(root).valid[keep:]:
            delete(root, checkpoint.step, checkpoint.path.name)

    _quietly(work)


def delete(root: ObjectPath, step: int, name: str) -> None:
    """Delete a checkpoint: first what makes it one, then its data."""
    (root / "begun" / name).write_bytes(b"")
    commit_of(root, step).unlink()
    discard(root, name)


def discard(root: ObjectPath, name: str) -> None:
    """Delete data that nothing commits, and what says that it is there."""
    (root / "data" / name).remove()
    (root / "begun" / name).unlink()


def _abandon(root: ObjectPath, step: int, name: str) -> None:
    """Delete the data of a save, unless it was committed, even if the store said otherwise."""

    def work() -> None:
        place = commit_of(root, step)
        if place.is_file() and _data_of(place.read_bytes()) == name:
            return
        discard(root, name)

    _quietly(work)


def _quietly(work: Callable[..., None], *arguments: Any) -> None:
    try:
        work(*arguments)
    except (ValueError, OSError, CheckpointError) as error:  # tensorstore raises ValueError
        logger.warning("something was left behind: %s", error)
