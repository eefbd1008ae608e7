"""Delete what is no longer needed, and never the last good checkpoint."""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_ckpt import files
from moe_ckpt.catalog import LATEST, Catalog, commit_of, find_step, scan
from moe_ckpt.errors import CheckpointError, CheckpointNotFound, DamageError, NotACheckpointError
from moe_ckpt.lease import Lease
from moe_ckpt.manifest import read_manifest
from moe_ckpt.object_commit import delete, discard
from moe_ckpt.objects import ObjectPath, Place, as_place


class Garbage(NamedTuple):
    """One thing that is, or would be, deleted.

    Attributes:
        path: Of a directory or file.
        reason: Why it is not needed.
        nbytes: That it takes on disk.
    """

    path: Place
    reason: str
    nbytes: int


@dataclass(frozen=True)
class Collected:
    """What ``collect`` deleted, or would have.

    Attributes:
        garbage: What.
        kept: Checkpoints that stay, newest first.
    """

    garbage: tuple[Garbage, ...]
    kept: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes that are free again."""
        return sum(item.nbytes for item in self.garbage)


def collect(
    root: str | Place, *, keep: int | None = None, damaged: bool = False, dry_run: bool = False
) -> Collected:
    """Delete unfinished saves and, on request, old and damaged checkpoints.

    What is not a checkpoint of this package, and checkpoints of a later format, are never
    touched.

    Args:
        root: Directory of a run that is not being saved to.
        keep: How many of the newest checkpoints stay, at least 1; None keeps all.
        damaged: Whether to delete checkpoints whose small files are damaged or missing. Only
            where a sound one is left.
        dry_run: Whether only to say what would be deleted.

    Raises:
        CheckpointNotFound: If there is no such directory.
        RootLockedError: If a run is saving to it.
    """
    root = as_place(root)
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1 or None, it is {keep}")
    if not root.is_dir():
        raise CheckpointNotFound(f"{root} does not exist")
    nonce = uuid.uuid4().hex
    with Lease(root, -1, nonce) if isinstance(root, ObjectPath) else files.locked(root, -1):
        catalog = scan(root)
        garbage = tuple(_garbage(catalog, keep, damaged))
        for item in () if dry_run else garbage:
            _delete(root, item.path)
    return Collected(garbage, tuple(c.path for c in catalog.valid[:keep]))


def _garbage(catalog: Catalog, keep: int | None, damaged: bool) -> Iterator[Garbage]:
    for path in catalog.leftovers:
        yield Garbage(path, "unfinished", size_of(path))
    for checkpoint in catalog.valid[keep:] if keep is not None else ():
        yield Garbage(checkpoint.path, f"older than the newest {keep}", size_of(checkpoint.path))
    if damaged and catalog.valid:
        broken = [item for item in catalog.skipped if item.path.name != LATEST]
        for item, error in zip(broken, catalog.errors, strict=True):
            if isinstance(error, DamageError | NotACheckpointError):
                yield Garbage(item.path, f"damaged: {item.reason}", size_of(item.path))


def _delete(root: Place, path: Any) -> None:
    if isinstance(root, ObjectPath):
        step = int(path.name.removeprefix("step-").partition(".")[0])
        place = commit_of(root, step)
        if path == place or (place.is_file() and find_step(root, step) == path):
            delete(root, step, path.name)
        else:
            discard(root, path.name)
        return
    # Out of sight of readers at once; what is then half deleted is no checkpoint.
    trash = root / f".trash-{uuid.uuid4().hex}"
    os.rename(path, trash)
    files.sync(root)
    files.remove(trash)


def size_of(path: Place) -> int:
    """Return the bytes of a file, or of all files below a directory.

    In an object store those of the chunks, as far as there is a manifest that says so.
    """
    if isinstance(path, ObjectPath):
        try:
            return sum(len(i.grid) * i.chunk_bytes for i in read_manifest(path).arrays)
        except CheckpointError:
            return 0
    found = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in found if file.is_file())
