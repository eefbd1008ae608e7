"""What differs between two checkpoints: by checksums first, which costs no reading."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moe_ckpt.chunks import read_chunks
from moe_ckpt.objects import Place
from moe_ckpt.progress import no_progress
from moe_ckpt.reader import CheckpointReader, open_checkpoint
from moe_ckpt.rows import TensorInfo


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
    ours = {(info.name, info.kind): info for info in a.manifest.tensors}
    theirs = {(info.name, info.kind): info for info in b.manifest.tensors}
    found: list[Difference] = []
    unlike: list[tuple[TensorInfo, TensorInfo]] = []
    for key in sorted(ours.keys() | theirs.keys()):
        label = "/".join(key)
        if key not in theirs or key not in ours:
            which = "first" if key in ours else "second"
            found.append(Difference(label, f"only in the {which}"))
        elif ours[key].shape != theirs[key].shape:
            shape = list(ours[key].shape)
            found.append(Difference(label, "shape", shape, list(theirs[key].shape)))
        elif ours[key].dtype != theirs[key].dtype:
            found.append(Difference(label, "dtype", ours[key].dtype, theirs[key].dtype))
        elif not _alike(ours[key], theirs[key]) or ours[key].digest != theirs[key].digest:
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
    pairs: list[tuple[TensorInfo, TensorInfo]],
    values: bool,
    progress: Callable[[int, int], None],
) -> Iterator[Difference]:
    total = sum(info.nbytes for info, _ in pairs)
    done = 0
    for ours, theirs in pairs:
        if not values and _alike(ours, theirs):
            yield Difference(ours.label, "values")
            continue
        difference = _measure(a, b, ours, theirs)
        done += ours.nbytes
        progress(done, total)
        if difference.elements:
            yield difference


def _alike(ours: TensorInfo, theirs: TensorInfo) -> bool:
    # Cut otherwise, by another version of the package, digests say nothing.
    if ours.packed or theirs.packed:
        return ours.packed and theirs.packed
    return ours.array.grid == theirs.array.grid


def _runs(
    a: CheckpointReader, ours: TensorInfo, theirs: TensorInfo
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield, with its first element, what of a tensor may differ from that of the second."""
    if ours.packed:
        yield 0, a.read(ours.name, ours.kind).reshape(-1)
        return
    numbers, array = ours.numbers, ours.array
    if _alike(ours, theirs):
        numbers = [int(n) for n in np.flatnonzero(array.crcs != theirs.array.crcs)]
    for number, values in read_chunks(a.path, array, numbers):
        yield array.grid.run(number)[0], values


def _measure(
    a: CheckpointReader, b: CheckpointReader, ours: TensorInfo, theirs: TensorInfo
) -> Difference:
    elements, largest, relative = 0, 0.0, 0.0
    word = f"u{np.dtype(ours.dtype).itemsize}"
    for start, x in _runs(a, ours, theirs):
        y = np.empty(x.size, theirs.dtype)
        b.read_into(theirs, [(start, start + x.size, y)])
        apart = x.view(word) != y.view(word)
        elements += int(apart.sum())
        with np.errstate(all="ignore"):
            gap = np.abs(x[apart].astype(np.float64) - y[apart])
            share = gap / np.abs(x[apart])
        largest = max(largest, float(np.nanmax(gap, initial=0.0)))
        relative = max(relative, float(np.nanmax(share, initial=0.0)))
    return Difference(ours.label, "values", elements=elements, largest=largest, relative=relative)


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
