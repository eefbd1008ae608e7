"""From a Hugging Face folder to a checkpoint, a chunk at a time."""

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_ckpt.errors import LayoutError
from moe_ckpt.hf.layout import Entry, entries
from moe_ckpt.hf.source import Source
from moe_ckpt.objects import Place
from moe_ckpt.plan import TensorPlan
from moe_ckpt.progress import no_progress
from moe_ckpt.reader import near
from moe_ckpt.writer import save_made

MOMENTS = ("exp_avg", "exp_avg_sq")


def import_hf(
    source: str | Path,
    root: str | Place,
    *,
    step: int = 0,
    config: Mapping[str, Any] | None = None,
    moments: bool = False,
    skip: Sequence[str] = (),
    overwrite: bool = False,
    progress: Callable[[int, int], None] = no_progress,
) -> Place:
    """Make a checkpoint of a model that is kept as Hugging Face keeps it.

    Every tensor becomes, or becomes a part of, a float32 master weight; float64 stays float64.
    No more than a few chunks are in memory. Nothing is ever unpickled.

    Args:
        source: Folder with ``config.json`` and safetensors files.
        root: Directory of the run that begins with it.
        step: Of the checkpoint.
        config: Instead of that of the folder, such as one with another ``model_type`` for a model
            that only calls itself otherwise.
        moments: Whether to save moments of AdamW beside the weights, all zero.
        skip: Patterns of names of tensors in the files to leave out, such as
            ``"model.layers.61.*"``. Any other tensor that the layout does not know is an error.
        overwrite: Whether a checkpoint of this step may be replaced.
        progress: Is called with the bytes done and the bytes in all.

    Returns:
        The directory of the checkpoint. Its state holds ``config`` under ``hf_config``.

    Raises:
        LayoutError: If the family is not known, or a tensor is missing, unknown, or of another
            shape than the configuration says; before anything is written.
        CorruptFileError: If a file is damaged.
    """
    model = Source(Path(source))
    config = dict(model.config if config is None else config)
    parts = _parts(model, entries(config), skip)
    tensors = [_tensor(*key, parts[key], model) for key in parts]
    if moments:
        tensors += [
            tensor._replace(kind=kind)
            for tensor in tensors
            if tensor.kind == "master"
            for kind in MOMENTS
        ]
    dtypes = {(tensor.name, tensor.kind): np.dtype(tensor.dtype) for tensor in tensors}

    def produce(name: str, kind: str, start: int, stop: int) -> np.ndarray:
        if kind in MOMENTS:
            return np.zeros(stop - start, dtypes[name, kind])
        return _run(model, parts[name, kind], dtypes[name, kind], start, stop)

    tensors.sort()
    state = {"hf_config": config, "source": "safetensors"}
    return save_made(
        root, tensors, produce, step=step, state=state, overwrite=overwrite, progress=progress
    )


def _parts(
    model: Source, wanted: Iterable[Entry], skip: Sequence[str]
) -> dict[tuple[str, str], list[Entry]]:
    """Return the parts of every tensor here, in order, after comparing them with the files."""
    parts: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    left = model.files.keys() - model.scales()
    for entry in wanted:
        if entry.source not in model.files:
            raise LayoutError(
                f"{model.folder} has no {entry.source}{near(entry.source, model.files)}"
            )
        if model.shape(entry.source) != entry.shape:
            raise LayoutError(
                f"{entry.source} has shape {model.shape(entry.source)} in {model.folder} and "
                f"{entry.shape} by its config.json"
            )
        left.discard(entry.source)
        parts[entry.name, entry.kind].append(entry)
    unknown = sorted(n for n in left if not any(fnmatch.fnmatchcase(n, p) for p in skip))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise LayoutError(
            f"{model.folder} holds {unknown[0]}{more}, which no {model.config.get('model_type')} "
            "model has; skip leaves out what is not wanted"
        )
    for entries_of in parts.values():
        entries_of.sort(key=lambda entry: entry.start)
    return parts


def _tensor(name: str, kind: str, parts: Sequence[Entry], model: Source) -> TensorPlan:
    wide = any(model.files[e.source].tensor(e.source).dtype == np.float64 for e in parts)
    return TensorPlan(name, kind, "float64" if wide else "float32", parts[0].whole)


def _run(
    model: Source, parts: Sequence[Entry], dtype: np.dtype, start: int, stop: int
) -> np.ndarray:
    values = np.empty(stop - start, dtype)
    for entry in parts:
        low, high = max(entry.start, start), min(entry.stop, stop)
        if low < high:
            run = model.read(entry.source, low - entry.start, high - entry.start)
            values[low - start : high - start] = run
    return values
