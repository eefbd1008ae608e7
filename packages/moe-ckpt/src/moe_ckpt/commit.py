"""How a save becomes a checkpoint on a file system: by one rename."""

import logging
import os
import shutil
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from moe_ckpt import files
from moe_ckpt.array import ArrayInfo, metadata_bytes
from moe_ckpt.catalog import LATEST, scan, step_directory
from moe_ckpt.errors import StepExistsError
from moe_ckpt.manifest import MANIFEST, sha256, small_files, to_json
from moe_ckpt.pack import PACKS

logger = logging.getLogger(__name__)


def open_staging(
    stack: ExitStack, root: Path, step: int, infos: Sequence[ArrayInfo], overwrite: bool
) -> str:
    """Lock the root and make a place for a save, which goes when the stack is closed.

    Returns:
        Where it is, below the root.

    Raises:
        StepExistsError: If the step is there and ``overwrite`` is false.
        RootLockedError: If another process is saving to the root.
    """
    files.make_root(root)
    stack.enter_context(files.locked(root, step))
    for leftover in scan(root).leftovers:
        logger.warning("removed %s, left by a save that did not end", leftover)
        files.remove(Path(str(leftover)))
    target = step_directory(root, step)
    if target.exists() and not overwrite:
        raise StepExistsError(f"{target} is there already; overwrite=True replaces it")
    staging = root / f".{target.name}.tmp-{uuid.uuid4().hex}"
    staging.mkdir()
    stack.callback(lambda: shutil.rmtree(staging, ignore_errors=True))
    (staging / "arrays").mkdir()
    last = ""
    for info in infos:
        directory = os.fspath(info.directory(staging))
        if (parent := os.path.dirname(directory)) != last:  # the kinds of a tensor, and the packs,
            os.mkdir(parent)  # follow one another
            last = parent
        os.mkdir(directory)
        files.write(Path(directory, "zarr.json"), metadata_bytes(info), durable=False)
    return staging.name


def commit(root: Path, staging: Path, step: int, infos: list[ArrayInfo], state: bytes) -> Path:
    """Make a complete staging directory the newest checkpoint. Runs on rank 0, under the lock."""
    target = step_directory(root, step)
    others = [c.sequence for c in scan(root).valid if c.step != step]
    sequence = 1 + max(others, default=-1)
    # Durable before they are vouched for: the metadata of arrays, then every directory.
    if len(infos) > files.MANY:
        files.sync_file_system(staging)
    else:
        tops = (staging / "arrays", staging / PACKS)
        directories = [Path(path) for top in tops for path, _, _ in os.walk(top)]
        files.sync_all([info.directory(staging) / "zarr.json" for info in infos] + directories)
    contents = small_files(step, sequence, infos, state)
    for name, data in contents.items():
        files.write(staging / name, data)
    files.sync(staging)
    hint = root / f".{LATEST}.tmp-{uuid.uuid4().hex}"
    seal = {"step": step, "manifest_sha256": sha256(contents[MANIFEST])}
    try:
        files.write(hint, to_json(seal))
        _publish(root, staging, target, hint)
    except BaseException:
        hint.unlink(missing_ok=True)
        raise
    return target


def _publish(root: Path, staging: Path, target: Path, hint: Path) -> None:
    # One rename makes the checkpoint visible; the old one of this step, if any, becomes the
    # staging directory. If anything after it fails, the same rename takes it back.
    latest, replaces = root / LATEST, target.exists()
    before = latest.read_bytes() if latest.exists() else None
    move = files.exchange if replaces else os.rename
    move(staging, target)
    try:
        files.sync(root)
        os.rename(hint, latest)
        files.sync(root)
    except BaseException:
        if replaces:
            files.exchange(staging, target)
        else:
            os.rename(target, staging)
        if before is None:
            latest.unlink(missing_ok=True)
        else:
            files.write(hint, before)
            os.rename(hint, latest)
        raise


def retire(root: Path, keep: int) -> None:
    """Delete all but the newest checkpoints. What cannot be deleted is logged."""
    # The new checkpoint stands, so nothing here may raise on rank 0 alone.
    try:
        for checkpoint in scan(root).valid[keep:]:
            trash = root / f".trash-{uuid.uuid4().hex}"
            os.rename(str(checkpoint.path), trash)
            files.sync(root)
            files.remove(trash)
    except OSError as error:
        logger.warning("old checkpoints were left behind in %s: %s", root, error)
