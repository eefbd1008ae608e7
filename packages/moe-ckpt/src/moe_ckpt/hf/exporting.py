"""From a checkpoint to a Hugging Face folder, a tensor at a time."""

import fnmatch
import math
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_ckpt import files
from moe_ckpt.chunks import read_chunks
from moe_ckpt.errors import ExtraTensorError, LayoutError, ShapeMismatchError
from moe_ckpt.hf.layout import ARCHITECTURES, Entry, entries
from moe_ckpt.hf.source import CONFIG, INDEX, SINGLE
from moe_ckpt.hf.tensor_file import write_tensors
from moe_ckpt.manifest import to_json
from moe_ckpt.objects import Place
from moe_ckpt.progress import no_progress
from moe_ckpt.reader import CheckpointReader, open_checkpoint
from moe_ckpt.rounding import DTYPES, rounded


def export_hf(
    path: str | Place,
    folder: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    file_bytes: int = 5 << 30,
    skip: Sequence[str] = (),
    progress: Callable[[int, int], None] = no_progress,
) -> Path:
    """Make a folder that transformers can load from the master weights of a checkpoint.

    Every value is rounded once, to the nearest. Buffers, such as the selection bias of a router,
    stay float32. One tensor of Hugging Face is in memory at a time, and one chunk.

    Args:
        path: Directory of the checkpoint.
        folder: To make; it must not exist. It appears when it is complete.
        config: Contents of ``config.json``; by default what ``import_hf`` left in the state.
        dtype: "bfloat16", "float16" or "float32".
        file_bytes: After which a further file is begun.
        skip: Patterns of names of tensors here to leave out. Any other master or buffer that a
            model of this configuration does not have is an error.
        progress: Is called with the bytes done and the bytes in all.

    Returns:
        ``folder``.

    Raises:
        LayoutError: If the configuration is missing, or of a family that is not known.
        MissingTensorError: If the checkpoint lacks a tensor.
        ExtraTensorError: If it has one that the model does not have.
        ShapeMismatchError: If a shape differs from what the configuration says.
        DamageError: If the checkpoint is damaged.
        FileExistsError: If ``folder`` exists.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, it is {dtype!r}")
    if file_bytes < 1:
        raise ValueError(f"file_bytes must be at least 1, it is {file_bytes}")
    reader, folder = open_checkpoint(path), Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    config = reader.state.get("hf_config") if config is None else config
    if config is None:
        raise LayoutError(f"{reader.path} was not imported and knows no config.json: give one")
    wanted = sorted(entries(config), key=lambda entry: (entry.name, entry.start))
    _check(reader, wanted, skip)
    partial = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex}")
    files.make_root(partial)
    try:
        _write(reader, partial, wanted, dtype, file_bytes, progress)
        described = {**config, "architectures": [ARCHITECTURES[config["model_type"]]]}
        # Newer releases of transformers read the first, older ones the second.
        described |= {"dtype": dtype, "torch_dtype": dtype}
        described.pop("quantization_config", None)  # what was 8 bits has been multiplied out
        files.write(partial / CONFIG, to_json(described))
        files.sync(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    files.sync(folder.resolve().parent)
    return folder


def _check(reader: CheckpointReader, wanted: Sequence[Entry], skip: Sequence[str]) -> None:
    for entry in wanted:
        shape = reader.shape(entry.name, entry.kind)
        if shape != entry.whole:
            raise ShapeMismatchError(
                f"{entry.name}/{entry.kind} has shape {shape} in {reader.path} and {entry.whole} "
                f"by the configuration, for {entry.source}",
                tensor=entry.name,
            )
    used = {(entry.name, entry.kind) for entry in wanted}
    left = [
        info.label
        for info in reader.manifest.tensors
        if info.kind in ("master", "buffer") and (info.name, info.kind) not in used
    ]
    left = [label for label in left if not any(_matches(label, p) for p in skip)]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ExtraTensorError(
            f"{reader.path} holds {left[0]}{more}, which a model of this configuration does not "
            "have; skip leaves out what is not wanted",
            tensors=left,
        )


def _matches(label: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(label, pattern) or fnmatch.fnmatchcase(
        label.rpartition("/")[0], pattern
    )


def _dtype(entry: Entry, dtype: str) -> str:
    return dtype if entry.kind == "master" else "float32"


def _size(entry: Entry, dtype: str) -> int:
    return math.prod(entry.shape) * DTYPES[_dtype(entry, dtype)].itemsize


def _write(
    reader: CheckpointReader,
    folder: Path,
    wanted: Sequence[Entry],
    dtype: str,
    file_bytes: int,
    progress: Callable[[int, int], None],
) -> None:
    groups: list[list[Entry]] = [[]]
    for entry in wanted:
        if groups[-1] and sum(_size(e, dtype) for e in [*groups[-1], entry]) > file_bytes:
            groups.append([])
        groups[-1].append(entry)
    cursor, places = Cursor(reader), {}
    total, done = sum(_size(entry, dtype) for entry in wanted), 0

    def tensors(group: Sequence[Entry]) -> Iterator[tuple[str, np.ndarray]]:
        nonlocal done
        for entry in group:
            values = cursor.read(entry)
            yield entry.source, rounded(values, _dtype(entry, dtype)).reshape(entry.shape)
            done += _size(entry, dtype)
            progress(done, total)

    for at, group in enumerate(groups, 1):
        name = SINGLE if len(groups) == 1 else f"model-{at:05}-of-{len(groups):05}.safetensors"
        forms = {e.source: (DTYPES[_dtype(e, dtype)], e.shape) for e in group}
        write_tensors(folder / name, forms, tensors(group), {"format": "pt"})
        places.update(dict.fromkeys(forms, name))
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        files.write(folder / INDEX, to_json(index))


class Cursor:
    """Reads runs of tensors in order and keeps the last chunk, which the next run may need.

    Args:
        reader: Of the checkpoint.
    """

    def __init__(self, reader: CheckpointReader):
        self.reader = reader
        self._at: tuple[str, str, int] | None = None
        self._chunk = np.empty(0)

    def read(self, entry: Entry) -> np.ndarray:
        """Return the elements of an entry, each chunk checked against the manifest."""
        info = self.reader.info(entry.name, entry.kind)
        if info.packed:
            whole = self.reader.read(entry.name, entry.kind).reshape(-1)
            return whole[entry.start : entry.stop]
        values, grid = np.empty(entry.stop - entry.start, info.dtype), info.array.grid
        for number in grid.overlapping(entry.start, entry.stop):
            if self._at != (info.name, info.kind, number):
                [(_, self._chunk)] = read_chunks(self.reader.path, info.array, [number])
                self._at = (info.name, info.kind, number)
            first, last = grid.run(number)
            low, high = max(first, entry.start), min(last, entry.stop)
            values[low - entry.start : high - entry.start] = self._chunk[low - first : high - first]
        return values
