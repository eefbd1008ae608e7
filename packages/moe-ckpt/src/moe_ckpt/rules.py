"""Which tensor of a checkpoint goes into which shard: by name, or by rules of the caller."""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ckpt.errors import (
    DtypeMismatchError,
    ExtraTensorError,
    MissingTensorError,
    RenameError,
    ShapeMismatchError,
)
from moe_ckpt.reader import CheckpointReader, near
from moe_ckpt.rows import TensorInfo
from moe_ckpt.shard import View

Key = tuple[str, str]


@dataclass(frozen=True)
class Rules:
    """What may differ between a checkpoint and the shards that it is loaded into.

    Attributes:
        rename: Pairs of a regular expression, which has to match the whole name of a tensor in
            the checkpoint, and what it is called here; the first that matches counts.
        allow_missing: Patterns of ``name/kind`` here that need not be in the checkpoint.
        allow_extra: Patterns of ``name/kind`` here that need not be asked for.
    """

    rename: tuple[tuple[str, str], ...] = ()
    allow_missing: tuple[str, ...] = ()
    allow_extra: tuple[str, ...] = ()

    def describe(self) -> list[Any]:
        """Return the rules as JSON, to compare those of other ranks."""
        rename = [list(rule) for rule in self.rename]
        return [rename, list(self.allow_missing), list(self.allow_extra)]


@dataclass(frozen=True)
class Fit:
    """What goes where.

    Attributes:
        infos: For each name and kind that a rank asks for and the checkpoint has, its tensor.
        renamed: Old and new names of tensors that are called otherwise here.
        missing: ``name/kind`` that ranks ask for and that the checkpoint does not have.
        unread: ``name/kind``, as it would be called here, that no rank asks for.
    """

    infos: Mapping[Key, TensorInfo]
    renamed: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    unread: tuple[str, ...]


def fit(
    reader: CheckpointReader, views: Sequence[View], wanted: Collection[Key], rules: Rules
) -> Fit:
    """Find the array of every shard, and refuse what no rule allows.

    Args:
        reader: Of the checkpoint.
        views: What this rank asks for.
        wanted: What all ranks ask for.
        rules: Of the caller.

    Raises:
        RenameError: If a rule is no regular expression, matches nothing, or gives two tensors one
            name.
        MissingTensorError: If the checkpoint lacks a tensor that no rule lets it lack.
        ShapeMismatchError: If a tensor has another shape.
        DtypeMismatchError: If it has another dtype.
        ExtraTensorError: If the checkpoint has a tensor that no rank asks for and no rule allows.
    """
    names = new_names(reader.names, rules.rename)
    here = {(names[info.name], info.kind): info for info in reader.manifest.tensors}
    for view in views:
        if (view.name, view.kind) in here:
            _check(reader, view, here[view.name, view.kind])
        elif not _allowed((view.name, view.kind), rules.allow_missing):
            raise _missing(reader, view, here)
    unread = [key for key in here if key not in wanted]
    if refused := [key for key in unread if not _allowed(key, rules.allow_extra)]:
        asked = [f"{name}/{kind}" for name, kind in wanted]
        raise _extra(reader, refused, here, asked)
    return Fit(
        {key: info for key, info in here.items() if key in wanted},
        tuple((old, new) for old, new in names.items() if old != new),
        tuple(sorted(map(label, set(wanted) - here.keys()))),
        tuple(map(label, unread)),
    )


def label(key: Key) -> str:
    """Return ``name/kind``."""
    return "/".join(key)


def new_names(names: Iterable[str], rename: Sequence[tuple[str, str]]) -> dict[str, str]:
    r"""Return what each tensor of a checkpoint is called here.

    Raises:
        RenameError: See ``fit``.

    Examples:
        >>> new_names(["blocks.0.w", "head"], [(r"blocks\.(\d+)\.(.*)", r"layers.\1.\2")])
        {'blocks.0.w': 'layers.0.w', 'head': 'head'}
    """
    used, found = set(), {}
    for name in names:
        found[name] = name
        for at, (pattern, replacement) in enumerate(rename):
            if match := _match(pattern, name):
                found[name] = _expand(match, pattern, replacement)
                used.add(at)
                break
    if idle := [pattern for at, (pattern, _) in enumerate(rename) if at not in used]:
        raise RenameError(
            f"rename: {idle[0]!r} is the first to match none of the {len(found)} names of the "
            f"checkpoint, such as {next(iter(found), 'none')!r}; a pattern has to match all of a "
            "name"
        )
    taken: dict[str, str] = {}
    for old, new in found.items():
        if new in taken:
            raise RenameError(f"rename: both {taken[new]} and {old} would be called {new}")
        taken[new] = old
    return found


def _match(pattern: str, name: str) -> re.Match[str] | None:
    try:
        return re.fullmatch(pattern, name)
    except re.error as error:
        raise RenameError(f"rename: {pattern!r} is not a regular expression: {error}") from error


def _expand(match: re.Match[str], pattern: str, replacement: str) -> str:
    try:
        return match.expand(replacement)
    except (re.error, IndexError) as error:
        raise RenameError(f"rename: {replacement!r} does not fit {pattern!r}: {error}") from error


def _allowed(key: Key, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(label(key), pattern) for pattern in patterns)


def _check(reader: CheckpointReader, view: View, info: TensorInfo) -> None:
    name = f"{view.name}/{view.kind}"
    if view.name != info.name:
        name += f" (there {info.name})"
    if info.shape != view.shape:
        raise ShapeMismatchError(
            f"{name} has shape {info.shape} in {reader.path} and {view.shape} here",
            tensor=view.name,
        )
    if info.dtype != view.data.dtype.name:
        raise DtypeMismatchError(
            f"{name} is {info.dtype} in {reader.path} and {view.data.dtype} here", tensor=view.name
        )


def _missing(reader: CheckpointReader, view: View, here: Mapping[Key, Any]) -> MissingTensorError:
    kinds = ", ".join(kind for name, kind in here if name == view.name)
    asked = f"{view.name}/{view.kind}"
    hint = f"; it has {kinds} of it" if kinds else near(asked, map(label, here))
    return MissingTensorError(
        f"{reader.path} has no {asked}{hint}", tensor=view.name, kind=view.kind
    )


def _extra(
    reader: CheckpointReader, refused: list[Key], here: Mapping[Key, TensorInfo], asked: list[str]
) -> ExtraTensorError:
    first, info = refused[0], here[refused[0]]
    there = "" if info.name == first[0] else f" (there {info.name})"
    more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    return ExtraTensorError(
        f"{reader.path} holds {label(first)}{there}{more}, which no shard asks for"
        f"{near(label(first), asked)}",
        tensors=[label(key) for key in refused],
    )
