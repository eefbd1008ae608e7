"""Read and verify one checkpoint, with numpy alone."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_ckpt.array import ArrayInfo, check_metadata
from moe_ckpt.catalog import Checkpoint, checkpoint_of, step_of
from moe_ckpt.chunks import check_stored, read_chunks
from moe_ckpt.errors import (
    CheckpointError,
    CorruptFileError,
    DamageError,
    MissingTensorError,
    NotACheckpointError,
)
from moe_ckpt.manifest import (
    CHECKSUMS,
    MANIFEST,
    SEAL,
    STATE,
    Manifest,
    read_manifest,
    read_state,
)
from moe_ckpt.objects import Place, as_place
from moe_ckpt.progress import no_progress
from moe_ckpt.rows import TensorInfo


class CheckpointReader:
    """One checkpoint, whose manifest, state and checksums have been checked.

    Args:
        path: Directory of the checkpoint, ``ROOT/step-00001200``.

    Raises:
        NotACheckpointError: If it is not one.
        CorruptFileError: If one of its small files is damaged.
        FormatVersionError: If this release does not read its format.
    """

    def __init__(self, path: str | Place):
        self.path = as_place(path)
        try:
            self.manifest: Manifest = read_manifest(self.path)
        except NotACheckpointError:
            if self.path.is_dir() and any(step_of(p.name) is not None for p in self.path.iterdir()):
                raise NotACheckpointError(
                    f"{path} holds checkpoints but is not one: name one, or use find_latest"
                ) from None
            raise
        self.checkpoint: Checkpoint = checkpoint_of(self.path, self.manifest)
        self.state: dict[str, Any] = read_state(self.path)
        self._tensors = {(info.name, info.kind): info for info in self.manifest.tensors}
        self._pack: tuple[ArrayInfo, np.ndarray] | None = None

    @property
    def step(self) -> int:
        """Step of the run."""
        return self.manifest.step

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in order."""
        return tuple(dict.fromkeys(info.name for info in self.manifest.tensors))

    def kinds(self, name: str) -> tuple[str, ...]:
        """Return which values of a tensor there are, in order."""
        return tuple(info.kind for info in self.manifest.tensors if info.name == name)

    def shape(self, name: str, kind: str = "master") -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.info(name, kind).shape

    def dtype(self, name: str, kind: str = "master") -> np.dtype:
        """Return the dtype of a tensor."""
        return np.dtype(self.info(name, kind).dtype)

    def info(self, name: str, kind: str = "master") -> TensorInfo:
        """Return what the manifest says about a tensor.

        Raises:
            MissingTensorError: If there is none; it names those with similar names.
        """
        if (name, kind) in self._tensors:
            return self._tensors[name, kind]
        kinds = ", ".join(self.kinds(name))
        hint = f"; it has {kinds} of it" if kinds else near(f"{name}/{kind}", self.labels())
        raise MissingTensorError(
            f"{self.path} has no {name}/{kind}{hint}",
            tensor=name,
            kind=kind,
        )

    def labels(self) -> list[str]:
        """Return ``name/kind`` of every tensor."""
        return [info.label for info in self.manifest.tensors]

    def read(self, name: str, kind: str = "master") -> np.ndarray:
        """Read a whole tensor, each chunk checked against the manifest.

        Raises:
            MissingTensorError: If there is none of this name and kind.
            ChunkError: If a chunk is missing, truncated, corrupt or another one.
            CorruptFileError: If ``zarr.json`` is not what the manifest implies.
        """
        info = self.info(name, kind)
        values = np.empty(info.size, info.dtype)
        self.read_into(info, [(0, info.size, values)])
        return values.reshape(info.shape)

    def read_into(self, info: TensorInfo, targets: Iterable[tuple[int, int, np.ndarray]]) -> int:
        """Read runs of the flat elements of a tensor, touching only the chunks that hold them.

        Args:
            info: Of the tensor, from ``info``.
            targets: For each run its first element, one past its last, and where to put it.

        Returns:
            Number of bytes read from chunk files. A chunk is read once however many runs it has,
            and the last pack is kept, since the next tensor is likely to be in it too.
        """
        if not info.packed:
            return _read_array(self.path, info.array, targets)
        nbytes, pack = 0, info.array
        if self._pack is None or self._pack[0] is not pack:
            values = np.empty(pack.grid.size, pack.dtype)
            nbytes = _read_array(self.path, pack, [(0, pack.grid.size, values)])
            self._pack = pack, values
        values = self._pack[1][info.start : info.start + info.size]
        for start, stop, target in targets:
            target[:] = values[start:stop]
        return nbytes

    def read_together(self, targets: Iterable[tuple[TensorInfo, int, int, np.ndarray]]) -> int:
        """Read runs of many tensors, each chunk once, and keep nothing.

        Args:
            targets: For each run its tensor, from ``info``, and what ``read_into`` takes.

        Returns:
            Number of bytes read from chunk files.
        """
        arrays: dict[int, tuple[ArrayInfo, list[tuple[int, int, np.ndarray]]]] = {}
        for info, start, stop, target in targets:
            _, runs = arrays.setdefault(id(info.array), (info.array, []))
            runs.append((info.start + start, info.start + stop, target))
        return sum(_read_array(self.path, array, runs) for array, runs in arrays.values())


def _read_array(
    path: Place, array: ArrayInfo, targets: Iterable[tuple[int, int, np.ndarray]]
) -> int:
    """Read runs of the elements of one array and return the bytes read."""
    check_metadata(path, array)
    wanted: dict[int, list[tuple[int, int, np.ndarray]]] = {}
    for start, stop, target in targets:
        for number in array.grid.overlapping(start, stop):
            wanted.setdefault(number, []).append((start, stop, target))
    for number, values in read_chunks(path, array, sorted(wanted)):
        first, last = array.grid.run(number)
        for start, stop, target in wanted[number]:
            low, high = max(first, start), min(last, stop)
            target[low - start : high - start] = values[low - first : high - first]
    return len(wanted) * array.chunk_bytes


def near(label: str, labels: Iterable[str]) -> str:
    """Return a hint at the labels most like one that is not there, or nothing."""
    found = difflib.get_close_matches(label, list(labels), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def open_checkpoint(path: str | Place) -> CheckpointReader:
    """Open one checkpoint for reading, without torch.

    Args:
        path: Directory of the checkpoint, ``ROOT/step-00001200``.

    Raises:
        CheckpointError: If it is not one or its small files are damaged.
    """
    return CheckpointReader(path)


@dataclass(frozen=True)
class Verified:
    """What was found to be intact.

    Attributes:
        step: Of the run.
        arrays: Number of tensors.
        chunks: Number of chunks, those of packs included.
        nbytes: Of the values.
    """

    step: int
    arrays: int
    chunks: int
    nbytes: int


def verify(
    path: str | Place,
    *,
    fast: bool = False,
    progress: Callable[[int, int], None] = no_progress,
) -> Verified:
    """Read every byte of a checkpoint and compare it with the manifest.

    Args:
        path: Directory of the checkpoint.
        fast: Whether of chunks only to compare length and checksum with the manifest, which reads
            four bytes of each and finds what is lost, cut or exchanged, but not what is changed.
        progress: Is called with the bytes done and the bytes in all.

    Raises:
        CheckpointError: The first problem, in order of name, kind and chunk.
    """
    for problem in problems(path, fast=fast, progress=progress):
        raise problem
    return summary(read_manifest(as_place(path)))


def summary(manifest: Manifest) -> Verified:
    """Return the numbers of a checkpoint."""
    chunks = sum(len(info.grid) for info in manifest.arrays)
    nbytes = sum(info.nbytes for info in manifest.tensors)
    return Verified(manifest.step, len(manifest.tensors), chunks, nbytes)


def problems(
    path: str | Place,
    *,
    fast: bool = False,
    progress: Callable[[int, int], None] = no_progress,
) -> Iterator[CheckpointError]:
    """Yield everything that ``verify`` could raise, chunk by chunk."""
    try:
        reader = CheckpointReader(path)
    except CheckpointError as error:
        yield error
        return
    known = {reader.path / name for name in (MANIFEST, SEAL, STATE, CHECKSUMS)}
    total = sum(len(info.grid) * info.chunk_bytes for info in reader.manifest.arrays)
    done = 0
    for info in reader.manifest.arrays:
        known.add(info.directory(reader.path) / "zarr.json")
        known.update(info.chunk_file(reader.path, number) for number in range(len(info.grid)))
        try:
            check_metadata(reader.path, info)
        except DamageError as error:
            yield error
        for problem in _bad_chunks(reader.path, info, fast):
            if problem is not None:
                yield problem
            done += info.chunk_bytes
            progress(done, total)
    for file in sorted(p for p in reader.path.rglob("*") if not p.is_dir()):
        if file not in known:
            yield CorruptFileError(f"{file} does not belong to this checkpoint", file=str(file))


def _bad_chunks(path: Place, info: ArrayInfo, fast: bool) -> Iterator[DamageError | None]:
    """Yield for every chunk, in order, what is wrong with it or None."""
    first, count = 0, len(info.grid)
    while first < count and not fast:
        try:
            for number, _ in read_chunks(path, info, range(first, count)):
                first = number + 1
                yield None
            return
        except DamageError as error:
            # Chunks are read ahead, so those before the bad one may not have been yielded yet.
            bad = info.grid.number(tuple(error.details["chunk"]))
            for number in range(first, bad):
                yield _bad_chunk(path, info, number, fast)
            yield error
            first = bad + 1
    for number in range(first, count):
        yield _bad_chunk(path, info, number, fast)


def _bad_chunk(path: Place, info: ArrayInfo, number: int, fast: bool) -> DamageError | None:
    try:
        if fast:
            check_stored(path, info, number)
        else:
            list(read_chunks(path, info, [number]))
    except DamageError as error:
        return error
    return None
