"""Export to safetensors, the format in which models are shared."""

import os
import uuid
from pathlib import Path

from safetensors.numpy import save_file

from moe_ckpt import files
from moe_ckpt.objects import Place
from moe_ckpt.reader import open_checkpoint
from moe_ckpt.rounding import rounded

_DTYPES = ("float32", "bfloat16")


def export_safetensors(path: str | Place, out_file: str | Path, dtype: str = "float32") -> Path:
    """Write the master weights of a checkpoint to one file, rounded to nearest even.

    All of them are in memory at once.

    Args:
        path: Directory of the checkpoint.
        out_file: File to make; an existing one is replaced when the new one is complete.
        dtype: "float32" or "bfloat16".

    Returns:
        ``out_file``.

    Raises:
        ValueError: If ``dtype`` is another one.
        CheckpointError: If the checkpoint is damaged.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, it is {dtype!r}")
    reader, out_file = open_checkpoint(path), Path(out_file)
    names = [name for name in reader.names if "master" in reader.kinds(name)]
    tensors = {name: rounded(reader.read(name), dtype) for name in names}
    partial = out_file.with_name(f".{out_file.name}.tmp-{uuid.uuid4().hex}")
    try:
        save_file(tensors, partial, metadata={"step": str(reader.step)})
        files.sync(partial)
        os.replace(partial, out_file)
    finally:
        partial.unlink(missing_ok=True)
    files.sync(out_file.resolve().parent)
    return out_file
