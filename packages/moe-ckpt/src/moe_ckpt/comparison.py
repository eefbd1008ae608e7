"""What differs between two checkpoints: by checksums first, which costs no reading."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moe_ckpt.array import ArrayInfo
from moe_ckpt.chunks import read_chunks
from moe_ckpt.objects import Place
from moe_ckpt.progress import no_progress
from moe_ckpt.reader import CheckpointReader, open_checkpoint


@dataclass(frozen=True)
class Difference:
    """One array that is not the same in both.

    Attributes:
        label: ``name/kind``.
        what: "only in the first", "only in the second", "shape", "dtype" or "values".
        first: Shape or dtype in the first, where that differs.
        second: The same of the second.
        elements: How many differ by a bit, if they were read.
        largest: The largest absolute difference of numbers, if they were read.
        relative: The largest difference relative to the first, if they were read.
    """

    label: str
    what: str
    first: Any = None
    second: Any = None
    elements: int | None = None
    largest: float | None = None
    relative: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what is known."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found.

    Attributes:
        equal: Number of arrays that are the same in both.
        differences: In order of name and kind.
        state: Keys of the states that differ, those of nested mappings joined by dots.
    """

    equal: int
    differences: tuple[Difference, ...]
    state: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences and not self.state


def compare(
    first: str | Place,
    second: str | Place,
    *,
    values: bool = False,
    progress: Callable[[int, int], None] = no_progress,
) -> Comparison:
    """Compare two checkpoints, whoever wrote them and at whatever step.

    Args:
        first: Directory of a checkpoint.
        second: Directory of the other.
        values: Whether to read the arrays that differ and say by how much. Otherwise only the
            manifests are read: equal checksums of all chunks are taken for equal values.
        progress: Is called with the bytes done and the bytes in all.

    Raises:
        CheckpointError: If one of them cannot be read.
    """
    a, b = open_checkpoint(first), open_checkpoint(second)
    ours = {(info.name, info.kind): info for info in a.manifest.arrays}
    theirs = {(info.name, info.kind): info for info in b.manifest.arrays}
    found: list[Difference] = []
    unlike: list[tuple[ArrayInfo, ArrayInfo]] = []
    for key in sorted(ours.keys() | theirs.keys()):
        label = "/".join(key)
        if key not in theirs or key not in ours:
            which = "first" if key in ours else "second"
            found.append(Difference(label, f"only in the {which}"))
        elif ours[key].grid.shape != theirs[key].grid.shape:
            shape = list(ours[key].grid.shape)
            found.append(Difference(label, "shape", shape, list(theirs[key].grid.shape)))
        elif ours[key].dtype != theirs[key].dtype:
            found.append(Difference(label, "dtype", ours[key].dtype, theirs[key].dtype))
        elif ours[key].grid != theirs[key].grid or (ours[key].crcs != theirs[key].crcs).any():
            unlike.append((ours[key], theirs[key]))
    found += _unlike(a, b, unlike, values, progress)
    found.sort(key=lambda difference: difference.label)
    state = tuple(_keys(a.state, b.state, ""))
    return Comparison(len(ours.keys() & theirs.keys()) - _shared(found), tuple(found), state)


def _shared(found: list[Difference]) -> int:
    return sum(not difference.what.startswith("only") for difference in found)


def _unlike(
    a: CheckpointReader,
    b: CheckpointReader,
    pairs: list[tuple[ArrayInfo, ArrayInfo]],
    values: bool,
    progress: Callable[[int, int], None],
) -> Iterator[Difference]:
    total = sum(info.grid.size * np.dtype(info.dtype).itemsize for info, _ in pairs)
    done = 0
    for ours, theirs in pairs:
        label = f"{ours.name}/{ours.kind}"
        # Cut otherwise, by another version of the package, checksums say nothing.
        if not values and ours.grid == theirs.grid:
            yield Difference(label, "values")
            continue
        difference = _measure(a, b, ours, theirs, label)
        done += ours.grid.size * np.dtype(ours.dtype).itemsize
        progress(done, total)
        if difference.elements:
            yield difference


def _measure(
    a: CheckpointReader, b: CheckpointReader, ours: ArrayInfo, theirs: ArrayInfo, label: str
) -> Difference:
    elements, largest, relative = 0, 0.0, 0.0
    word = f"u{np.dtype(ours.dtype).itemsize}"
    numbers = range(len(ours.grid))
    if ours.grid == theirs.grid:
        numbers = [int(n) for n in np.flatnonzero(ours.crcs != theirs.crcs)]
    for number, x in read_chunks(a.path, ours, numbers):
        start, stop = ours.grid.run(number)
        y = np.empty(stop - start, theirs.dtype)
        b.read_into(theirs, [(start, stop, y)])
        apart = x.view(word) != y.view(word)
        elements += int(apart.sum())
        with np.errstate(all="ignore"):
            gap = np.abs(x[apart].astype(np.float64) - y[apart])
            share = gap / np.abs(x[apart])
        largest = max(largest, float(np.nanmax(gap, initial=0.0)))
        relative = max(relative, float(np.nanmax(share, initial=0.0)))
    return Difference(label, "values", elements=elements, largest=largest, relative=relative)


def _keys(a: Any, b: Any, where: str) -> Iterator[str]:
    if not isinstance(a, dict) or not isinstance(b, dict):
        if a != b:
            yield where
        return
    for key in sorted(a.keys() | b.keys()):
        path = f"{where}.{key}" if where else key
        if key in a and key in b:
            yield from _keys(a[key], b[key], path)
        else:
            yield path
