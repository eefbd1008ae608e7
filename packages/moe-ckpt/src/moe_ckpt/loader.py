"""Load: find the newest sound checkpoint and read into the memory of the shards."""

import fnmatch
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ckpt.catalog import Checkpoint, Skipped, not_found, scan, step_directory
from moe_ckpt.comm import Alone, Communicator, Together
from moe_ckpt.errors import (
    DamageError,
    DtypeMismatchError,
    ExtraTensorError,
    RankMismatchError,
    ShapeMismatchError,
)
from moe_ckpt.reader import CheckpointReader, near
from moe_ckpt.shard import Shard, View, view_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What ``load`` did.

    Attributes:
        step: Of the checkpoint that was read.
        state: Saved with it.
        path: Its directory.
        skipped: Newer checkpoints that could not be used, and why.
        bytes_read: By this rank, from the files of chunks.
    """

    step: int
    state: dict[str, Any]
    path: Path
    skipped: tuple[Skipped, ...]
    bytes_read: int


def load(
    root: str | Path,
    into: Iterable[Shard],
    *,
    step: int | None = None,
    comm: Communicator | None = None,
    allow_extra: Sequence[str] = (),
) -> Loaded:
    """Read a checkpoint into the shards of all ranks, whatever the shards were that wrote it.

    Every rank calls it with its own shards and the same other arguments. It reads the chunks that
    hold its shards, each once, and writes into ``shard.data`` in place. If it raises, it raises
    on every rank; what the shards hold is then unspecified if the error is a ``DamageError`` or
    ``RankFailedError``, and unchanged otherwise.

    Args:
        root: Directory of the run.
        into: Where to put the values. Between them the ranks must ask for every tensor.
        step: Which one. By default the newest sound one: a damaged one is skipped, which is
            logged and reported. A step asked for by number is never replaced by another.
        comm: The ranks that load together; by default this process alone.
        allow_extra: Patterns such as ``"*/exp_avg*"`` of tensors that may stay unread.

    Raises:
        CheckpointNotFound: If there is no checkpoint, or none of ``step``.
        MissingTensorError: If a shard asks for a tensor that was not saved.
        ExtraTensorError: If a tensor was saved that no rank asks for.
        ShapeMismatchError: If its shape differs.
        DtypeMismatchError: If its dtype differs.
        DamageError: If ``step``, or every checkpoint there is, is damaged; the class says how.
    """
    together = Together(comm or Alone())
    views = together.attempt(_views, into) or []
    calls = together.agree({"step": step, "shards": [view.describe() for view in views]})
    for rank, call in enumerate(calls):
        if call["step"] != calls[0]["step"]:
            raise RankMismatchError(
                f"step is {calls[0]['step']} on rank 0 and {call['step']} on rank {rank}"
            )
    wanted = {(name, kind) for call in calls for name, kind, *_ in call["shards"]}
    names, reasons = together.on_first(_candidates, Path(root), step)
    # Each rank under its own root: nodes may mount one file system in different places.
    skipped = [Skipped(Path(root, name), reason) for name, reason in reasons]
    damage = []
    for name, sha256 in names:
        path = Path(root, name)
        try:
            reader, nbytes = _try(together, path, sha256, views, wanted, allow_extra)
        except DamageError as error:
            damage.append(error)
            skipped.append(Skipped(path, f"{type(error).__name__}: {error}"))
            continue
        for item in skipped:
            logger.warning("skipped %s: %s", item.path, item.reason)
        return Loaded(reader.step, reader.state, reader.path, tuple(skipped), nbytes)
    for item in skipped:
        if item.path.name != names[0][0]:
            damage[0].add_note(f"damaged too: {item.path}: {item.reason}")
    raise damage[0]


def _views(into: Iterable[Shard]) -> list[View]:
    return [view_of(shard, writable=True) for shard in into]


def _try(
    together: Together,
    path: Path,
    sha256: str,
    views: Sequence[View],
    wanted: set[tuple[str, str]],
    allow_extra: Sequence[str],
) -> tuple[CheckpointReader, int]:
    """Load one checkpoint on all ranks, or raise on all; the first ``agree`` precedes any read."""
    reader = together.attempt(_open, path, sha256, views, wanted, allow_extra)
    together.agree()
    assert reader is not None  # or agree would have raised
    nbytes = together.attempt(_read, reader, views)
    together.agree()
    return reader, nbytes or 0


def _candidates(root: Path, step: int | None) -> tuple[list[Any], list[Any]]:
    """Return what to try, newest first, and what is damaged, as JSON for the other ranks."""
    catalog = scan(root)
    found: Sequence[Checkpoint] = catalog.valid
    if step is not None:
        if step_directory(root, step).exists():
            reader = CheckpointReader(step_directory(root, step))
            return [[reader.path.name, reader.manifest.sha256]], []
        raise not_found(root, catalog, step)
    if not found:
        raise catalog.errors[0] if catalog.errors else not_found(root, catalog, step)
    names = [[c.path.name, c.manifest_sha256] for c in found]
    return names, [[s.path.name, s.reason] for s in catalog.skipped]


def _open(
    path: Path,
    sha256: str,
    views: Sequence[View],
    wanted: set[tuple[str, str]],
    allow_extra: Sequence[str],
) -> CheckpointReader:
    reader = CheckpointReader(path)
    if reader.manifest.sha256 != sha256:
        raise RankMismatchError(
            f"{path} has manifest {sha256[:12]} on rank 0 and {reader.manifest.sha256[:12]} here: "
            "all ranks must see one file system"
        )
    _check_fit(reader, views, wanted, allow_extra)
    return reader


def _check_fit(
    reader: CheckpointReader,
    views: Sequence[View],
    wanted: set[tuple[str, str]],
    allow_extra: Sequence[str],
) -> None:
    for view in views:
        info, label = reader.info(view.name, view.kind), f"{view.name}/{view.kind}"
        if info.grid.shape != view.shape:
            raise ShapeMismatchError(
                f"{label} has shape {info.grid.shape} in {reader.path} and {view.shape} here",
                tensor=view.name,
            )
        if info.dtype != view.data.dtype.name:
            raise DtypeMismatchError(
                f"{label} is {info.dtype} in {reader.path} and {view.data.dtype} here",
                tensor=view.name,
            )
    asked = {f"{name}/{kind}" for name, kind in wanted}
    extra = [
        label
        for label in reader.labels()
        if label not in asked and not any(fnmatch.fnmatchcase(label, p) for p in allow_extra)
    ]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ExtraTensorError(
            f"{reader.path} holds {extra[0]}{more}, which no shard asks for{near(extra[0], asked)}",
            tensors=extra,
        )


def _read(reader: CheckpointReader, views: Sequence[View]) -> int:
    targets: dict[tuple[str, str], list[View]] = {}
    for view in views:
        targets.setdefault((view.name, view.kind), []).append(view)
    return sum(
        reader.read_into(reader.info(*key), [(v.start, v.stop, v.data) for v in mine])
        for key, mine in targets.items()
    )
