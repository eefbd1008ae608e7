"""Load: find the newest sound checkpoint and read into the memory of the shards."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ckpt.catalog import Checkpoint, Skipped, find_step, not_found, scan
from moe_ckpt.comm import Alone, Communicator, Together
from moe_ckpt.errors import DamageError, RankMismatchError
from moe_ckpt.objects import Place, as_place
from moe_ckpt.reader import CheckpointReader
from moe_ckpt.rules import Fit, Rules, fit
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
        bytes_read: By this rank, from the files of chunks, with their checksums.
        bytes_wanted: Of the values that were put into the shards of this rank. ``bytes_read`` is
            more by what else the same chunks hold.
        renamed: Old and new names of the tensors that are called otherwise here.
        missing: ``name/kind`` that were not in the checkpoint; their shards are as they were.
        unread: ``name/kind`` in the checkpoint that no rank asked for.
    """

    step: int
    state: dict[str, Any]
    path: Place
    skipped: tuple[Skipped, ...]
    bytes_read: int
    bytes_wanted: int = 0
    renamed: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def load(
    root: str | Place,
    into: Iterable[Shard],
    *,
    step: int | None = None,
    comm: Communicator | None = None,
    rename: Sequence[tuple[str, str]] = (),
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
) -> Loaded:
    r"""Read a checkpoint into the shards of all ranks, whatever the shards were that wrote it.

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
        rename: Pairs such as ``(r"blocks\.(\d+)\.(.*)", r"layers.\1.\2")``: a regular expression
            for the whole name of a tensor in the checkpoint, and what it is called here. The
            first that matches counts; one that matches nothing is an error.
        allow_missing: Patterns such as ``"head/*"`` of tensors that need not be in the checkpoint.
            Their shards stay as they are, which is logged and reported.
        allow_extra: Patterns such as ``"*/exp_avg*"`` of tensors that may stay unread.

    Raises:
        RenameError: If a rule of ``rename`` matches nothing, or two tensors would have one name.
        CheckpointNotFound: If there is no checkpoint, or none of ``step``.
        MissingTensorError: If a shard asks for a tensor that was not saved.
        ExtraTensorError: If a tensor was saved that no rank asks for.
        ShapeMismatchError: If its shape differs.
        DtypeMismatchError: If its dtype differs.
        DamageError: If ``step``, or every checkpoint there is, is damaged; the class says how.
    """
    together = Together(comm or Alone())
    views = together.attempt(_views, into) or []
    rules = Rules(tuple(rename), tuple(allow_missing), tuple(allow_extra))
    call = {"step": step, "rules": rules.describe()}
    calls = together.agree({**call, "shards": [view.describe() for view in views]})
    _check_same(calls)
    wanted = {(name, kind) for call in calls for name, kind, *_ in call["shards"]}
    root = as_place(root)
    names, reasons = together.on_first(_candidates, root, step)
    # Each rank under its own root: nodes may mount one file system in different places.
    skipped = [Skipped(root / name, reason) for name, reason in reasons]
    damage = []
    for name, sha256 in names:
        path = root / name
        try:
            reader, fitted, nbytes = _try(together, path, sha256, views, wanted, rules)
        except DamageError as error:
            damage.append(error)
            skipped.append(Skipped(path, f"{type(error).__name__}: {error}"))
            continue
        for item in skipped:
            logger.warning("skipped %s: %s", item.path, item.reason)
        if fitted.missing:
            logger.warning("not in %s, left as they are: %s", path, ", ".join(fitted.missing))
        loaded = sum(v.data.nbytes for v in views if (v.name, v.kind) in fitted.infos)
        source = (reader.step, reader.state, reader.path, tuple(skipped))
        return Loaded(*source, nbytes, loaded, fitted.renamed, fitted.missing, fitted.unread)
    for item in skipped:
        if _below(root, item.path) != names[0][0]:
            damage[0].add_note(f"damaged too: {item.path}: {item.reason}")
    raise damage[0]


def _views(into: Iterable[Shard]) -> list[View]:
    return [view_of(shard, writable=True) for shard in into]


def _check_same(calls: Sequence[dict[str, Any]]) -> None:
    for rank, call in enumerate(calls):
        for what in ("step", "rules"):
            if call[what] != calls[0][what]:
                raise RankMismatchError(
                    f"{what} is {calls[0][what]} on rank 0 and {call[what]} on rank {rank}"
                )


def _try(
    together: Together,
    path: Place,
    sha256: str,
    views: Sequence[View],
    wanted: set[tuple[str, str]],
    rules: Rules,
) -> tuple[CheckpointReader, Fit, int]:
    """Load one checkpoint on all ranks, or raise on all; the first ``agree`` precedes any read."""
    opened = together.attempt(_open, path, sha256, views, wanted, rules)
    together.agree()
    assert opened is not None  # or agree would have raised
    reader, fitted = opened
    nbytes = together.attempt(_read, reader, fitted, views)
    together.agree()
    return reader, fitted, nbytes or 0


def _candidates(root: Place, step: int | None) -> tuple[list[Any], list[Any]]:
    """Return what to try, newest first, and what is damaged, as JSON for the other ranks."""
    catalog = scan(root)
    found: Sequence[Checkpoint] = catalog.valid
    if step is not None:
        if (place := find_step(root, step)) is not None:
            reader = CheckpointReader(place)
            return [[_below(root, place), reader.manifest.sha256]], []
        raise not_found(root, catalog, step)
    if not found:
        raise catalog.errors[0] if catalog.errors else not_found(root, catalog, step)
    names = [[_below(root, c.path), c.manifest_sha256] for c in found]
    return names, [[_below(root, s.path), s.reason] for s in catalog.skipped]


def _below(root: Place, place: Any) -> str:
    return str(place.relative_to(root))


def _open(
    path: Place,
    sha256: str,
    views: Sequence[View],
    wanted: set[tuple[str, str]],
    rules: Rules,
) -> tuple[CheckpointReader, Fit]:
    reader = CheckpointReader(path)
    if reader.manifest.sha256 != sha256:
        raise RankMismatchError(
            f"{path} has manifest {sha256[:12]} on rank 0 and {reader.manifest.sha256[:12]} here: "
            "all ranks must see one file system"
        )
    return reader, fit(reader, views, wanted, rules)


def _read(reader: CheckpointReader, fitted: Fit, views: Sequence[View]) -> int:
    return reader.read_together(
        (fitted.infos[view.name, view.kind], view.start, view.stop, view.data)
        for view in views
        if (view.name, view.kind) in fitted.infos
    )
