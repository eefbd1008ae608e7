"""The command line: look at checkpoints and check them."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_ckpt.array import ArrayInfo
from moe_ckpt.catalog import Checkpoint, scan, step_of
from moe_ckpt.errors import CheckpointError
from moe_ckpt.reader import open_checkpoint, problems, verify

OK, BAD, USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``moe-ckpt`` and return its exit code: 0 good, 1 bad or not found, 2 usage."""
    options = _parser().parse_args(arguments)
    path = Path(options.path)
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        sys.stderr.write(f"moe-ckpt: {path} {what}\n")
        return USAGE
    try:
        return options.command(path)
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"moe-ckpt: {error}\n")
        return BAD


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moe-ckpt", description="Look at checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, what, text in (
        ("inspect", inspect, "PATH", "show what a checkpoint holds"),
        ("ls", ls, "ROOT", "list the checkpoints of a run, newest first"),
        ("verify", verify_all, "PATH", "read every byte and name each bad chunk"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        place = "the run" if what == "ROOT" else "a checkpoint, or of a run: its newest one"
        sub.add_argument("path", metavar=what, help=f"directory of {place}")
        sub.set_defaults(command=command)
    return parser


def inspect(path: Path) -> int:
    """Print the arrays and the state of a checkpoint."""
    reader = open_checkpoint(_resolve(path))
    arrays = reader.manifest.arrays
    files = sum(len(info.grid) for info in arrays)
    _print(f"{reader.path}")
    _print(f"step {reader.step}, written by {reader.manifest.writer}")
    _print(f"{len(arrays)} arrays, {files} chunks, {_size(sum(map(_nbytes, arrays)))}")
    width = max((len(f"{info.name}/{info.kind}") for info in arrays), default=0)
    for info in arrays:
        shape = "x".join(map(str, info.grid.shape)) or "scalar"
        label = f"{info.name}/{info.kind}"
        _print(f"  {label:{width}}  {info.dtype}  {shape}  {_size(_nbytes(info))}")
    _print(f"state {json.dumps(reader.state, sort_keys=True)}")
    return OK


def ls(root: Path) -> int:
    """Print the checkpoints of a run, newest first, then what is damaged or unfinished."""
    catalog = scan(root)
    for checkpoint in catalog.valid:
        _print(f"{checkpoint.path.name}  step {checkpoint.step}  {_size(_on_disk(checkpoint))}")
    for skipped in catalog.skipped:
        _print(f"{skipped.path.name}  damaged: {skipped.reason}")
    for leftover in catalog.leftovers:
        _print(f"{leftover.name}  unfinished")
    if not catalog.valid and not catalog.skipped:
        _print(f"no checkpoint in {root}")
    return OK if catalog.valid and not catalog.skipped else BAD


def verify_all(path: Path) -> int:
    """Print each thing that is wrong with a checkpoint."""
    path, bad = _resolve(path), 0
    for problem in problems(path):
        _print(f"{type(problem).__name__}: {problem}")
        bad += 1
    if bad:
        _print(f"{path}: {bad} problems")
        return BAD
    good = verify(path)
    _print(f"{path}: {good.arrays} arrays, {good.chunks} chunks, {_size(good.nbytes)}, all good")
    return OK


def _resolve(path: Path) -> Path:
    """Return the newest checkpoint if ``path`` is a run, else ``path``."""
    if step_of(path.name) is None and (catalog := scan(path)).valid:
        return catalog.valid[0].path
    return path


def _nbytes(info: ArrayInfo) -> int:
    return info.grid.size * np.dtype(info.dtype).itemsize


def _on_disk(checkpoint: Checkpoint) -> int:
    return sum(file.stat().st_size for file in checkpoint.path.rglob("*") if file.is_file())


def _size(nbytes: int) -> str:
    power = min(3, int(math.log(nbytes, 1024))) if nbytes else 0
    return f"{nbytes / 1024**power:.3g} {['bytes', 'KiB', 'MiB', 'GiB'][power]}"


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
