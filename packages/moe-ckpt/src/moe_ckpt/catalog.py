"""Which checkpoints a root holds."""

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path

from moe_ckpt.errors import CheckpointError, CheckpointNotFound, CorruptFileError
from moe_ckpt.manifest import Manifest, read_manifest
from moe_ckpt.objects import ObjectPath, Place, as_place

LATEST = "LATEST"
_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(step-\d{8,}\.tmp|LATEST\.tmp|trash)-[0-9a-f]+(-aside)?")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest, state and checksums are intact; its chunks were not read.

    Attributes:
        path: Its directory.
        step: Of the run.
        sequence: Counts the saves to one root; the highest is the newest.
        manifest_sha256: Of ``manifest.json``.
    """

    path: Place
    step: int
    sequence: int
    manifest_sha256: str


@dataclass(frozen=True)
class Skipped:
    """Something in a root that should have been used but could not be.

    Attributes:
        path: Of a checkpoint, or of the file ``LATEST``.
        reason: Why.
    """

    path: Place
    reason: str


@dataclass(frozen=True)
class Catalog:
    """What a root holds.

    Attributes:
        valid: Newest first.
        skipped: What is damaged, highest step first.
        errors: For each damaged checkpoint in ``skipped``, what reading it raised.
        leftovers: What saves that died and deletions that did not end have left.
    """

    valid: tuple[Checkpoint, ...]
    skipped: tuple[Skipped, ...]
    errors: tuple[CheckpointError, ...] = field(repr=False)
    leftovers: tuple[Place, ...]


def step_directory(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return root / f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that the name of a directory stands for, or None."""
    match = _STEP.fullmatch(name)
    if match is None or name != f"step-{int(match[1]):08d}":
        return None
    return int(match[1])


def commit_of(root: ObjectPath, step: int) -> ObjectPath:
    """Return the object that makes a checkpoint of a step, in an object store."""
    return root / "commits" / f"step-{step:08d}"


def find_step(root: Place, step: int) -> Place | None:
    """Return where the checkpoint of a step is, damaged or not, or None if there is none.

    Raises:
        CorruptFileError: If an object store has one and what names its data is damaged.
    """
    if isinstance(root, ObjectPath):
        return _committed(root, step)[0] if commit_of(root, step).is_file() else None
    path = step_directory(root, step)
    return path if path.exists() else None


def _committed(root: ObjectPath, step: int) -> tuple[ObjectPath, str]:
    place = commit_of(root, step)
    try:
        fields = json.loads(place.read_bytes())
        return root / "data" / str(fields["data"]), str(fields["manifest_sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(
            f"{place} cannot be understood: {error!r}", file=str(place)
        ) from error


def _read_committed(root: ObjectPath, step: int) -> Checkpoint:
    path, seal = _committed(root, step)
    found = checkpoint_of(path, read_manifest(path))
    if found.manifest_sha256 != seal or found.step != step:
        raise CorruptFileError(f"{commit_of(root, step)} is not of {path}", file=str(path))
    return found


def scan(root: Place) -> Catalog:
    """Read the manifest of every checkpoint in ``root``, which may not exist."""
    if isinstance(root, ObjectPath):
        return _scan_objects(root)
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    steps = sorted((s for s in map(step_of, names) if s is not None), reverse=True)
    valid, skipped, errors = [], [], []
    for step in steps:
        path = step_directory(root, step)
        try:
            valid.append(checkpoint_of(path, read_manifest(path)))
        except CheckpointError as error:
            skipped.append(Skipped(path, f"{type(error).__name__}: {error}"))
            errors.append(error)
    valid = _newest_first(valid)
    if steps or LATEST in names:
        skipped += _check_hint(root, valid)
    leftovers = [root / n for n in names if _LEFTOVER.fullmatch(n)]
    return Catalog(tuple(valid), tuple(skipped), tuple(errors), tuple(leftovers))


def _scan_objects(root: ObjectPath) -> Catalog:
    found = (step_of(entry.name) for entry in (root / "commits").iterdir())
    steps = sorted((step for step in found if step is not None), reverse=True)
    valid, skipped, errors, data = [], [], [], set()
    for step in steps:
        path = commit_of(root, step)
        try:
            path = _committed(root, step)[0]
            data.add(path.name)
            valid.append(_read_committed(root, step))
        except CheckpointError as error:
            skipped.append(Skipped(path, f"{type(error).__name__}: {error}"))
            errors.append(error)
    valid = _newest_first(valid)
    skipped += _check_hint(root, valid)
    begun = [entry.name for entry in (root / "begun").iterdir()]
    leftovers = [root / "data" / name for name in begun if name not in data]
    return Catalog(tuple(valid), tuple(skipped), tuple(errors), tuple(leftovers))


def _newest_first(found: list[Checkpoint]) -> list[Checkpoint]:
    return sorted(found, key=lambda c: (c.sequence, c.step), reverse=True)


def checkpoint_of(path: Place, manifest: Manifest) -> Checkpoint:
    """Return the entry of a checkpoint.

    Raises:
        CorruptFileError: If the directory is named after another step.
    """
    named = step_of(path.name)
    if named is not None and named != manifest.step:
        raise CorruptFileError(f"{path} holds step {manifest.step}", file=str(path))
    return Checkpoint(path, manifest.step, manifest.sequence, manifest.sha256)


def _check_hint(root: Place, valid: list[Checkpoint]) -> list[Skipped]:
    # LATEST is for people and scripts. It lags behind by one if a save died just before writing
    # it; it names what is not there if the newest checkpoint was lost.
    path = root / LATEST
    try:
        hint = json.loads(path.read_bytes())
        step, sha256 = int(hint["step"]), str(hint["manifest_sha256"])
    except FileNotFoundError:
        return []  # the first save died just before writing it, or it was never copied
    except (ValueError, KeyError, TypeError):
        return [Skipped(path, "is not the JSON of a step and the SHA-256 of its manifest")]
    if any(c.step == step and c.manifest_sha256 == sha256 for c in valid):
        return []
    return [Skipped(path, f"names step {step} with manifest {sha256[:12]}…, which is not here")]


def find_latest(root: str | Place) -> Checkpoint | None:
    """Return the newest checkpoint of which manifest, state and checksums are intact.

    It reads these small files of every checkpoint and no chunk. Newest is the one that was saved
    last, which after going back to an earlier step is not the one with the highest step.

    Args:
        root: Directory of a run.

    Returns:
        None if the root does not exist or holds no sound checkpoint. If it holds damaged ones
        they are logged; ``load`` and ``scan`` tell that apart from a root that was never used.
    """
    catalog = scan(as_place(root))
    for skipped in catalog.skipped:
        logger.warning("skipped %s: %s", skipped.path, skipped.reason)
    return catalog.valid[0] if catalog.valid else None


def not_found(root: Place, catalog: Catalog, step: int | None) -> CheckpointNotFound:
    """Return the error that says what there is instead."""
    what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    if not root.exists():
        return CheckpointNotFound(f"{what}: {root} does not exist")
    steps = sorted(checkpoint.step for checkpoint in catalog.valid)
    there = f"steps {', '.join(map(str, steps))}" if steps else "none"
    unfinished = f", and {len(catalog.leftovers)} unfinished" if catalog.leftovers else ""
    return CheckpointNotFound(f"{what} in {root}: it holds {there}{unfinished}")
