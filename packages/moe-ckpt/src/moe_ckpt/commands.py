"""What each command of ``moe-ckpt`` does. Results go to stdout, bars to stderr."""

import fnmatch
import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from moe_ckpt.catalog import scan, step_of
from moe_ckpt.collection import collect, size_of
from moe_ckpt.comparison import Difference, compare
from moe_ckpt.errors import CheckpointError
from moe_ckpt.export import export_safetensors
from moe_ckpt.hf import export_hf, import_hf
from moe_ckpt.objects import Place
from moe_ckpt.progress import Bar
from moe_ckpt.reader import open_checkpoint, problems, summary
from moe_ckpt.rows import TensorInfo

OK, BAD, USAGE = 0, 1, 2


def inspect(options: Namespace) -> int:
    """Print the arrays and the state of a checkpoint."""
    reader = open_checkpoint(resolve(options.path))
    every = reader.manifest.tensors
    arrays = [i for i in every if fnmatch.fnmatchcase(i.label, options.tensors)]
    whole = summary(reader.manifest)
    if options.json:
        return _json(
            path=str(reader.path),
            step=reader.step,
            sequence=reader.manifest.sequence,
            writer=reader.manifest.writer,
            producers=reader.manifest.producers,
            config_sha256=reader.manifest.config_sha256,
            manifest_sha256=reader.manifest.sha256,
            bytes=whole.nbytes,
            chunks=whole.chunks,
            arrays=[_array(info) for info in arrays],
            state=reader.state,
        )
    _print(f"{reader.path}")
    _print(f"step {reader.step}, written by {reader.manifest.writer}")
    _print(f"{len(every)} arrays, {whole.chunks} chunks, {size(whole.nbytes)}")
    width = max((len(info.label) for info in arrays), default=0)
    for info in arrays:
        shape = "x".join(map(str, info.shape)) or "scalar"
        _print(f"  {info.label:{width}}  {info.dtype}  {shape}  {size(info.nbytes)}")
    _print(f"state {json.dumps(reader.state, sort_keys=True)}")
    return OK


def ls(options: Namespace) -> int:
    """Print the checkpoints of a run, newest first, then what is damaged or unfinished."""
    root = options.root
    catalog = scan(root)
    code = OK if catalog.valid and not catalog.skipped else BAD
    if options.json:
        _json(
            root=str(root),
            checkpoints=[
                {"path": str(c.path), "step": c.step, "sequence": c.sequence,
                 "manifest_sha256": c.manifest_sha256, "bytes": size_of(c.path)}
                for c in catalog.valid
            ],
            damaged=[{"path": str(s.path), "reason": s.reason} for s in catalog.skipped],
            unfinished=[str(path) for path in catalog.leftovers],
        )  # fmt: skip
        return code
    for checkpoint in catalog.valid:
        name = checkpoint.path.name
        _print(f"{name}  step {checkpoint.step}  {size(size_of(checkpoint.path))}")
    for skipped in catalog.skipped:
        _print(f"{skipped.path.name}  damaged: {skipped.reason}")
    for leftover in catalog.leftovers:
        _print(f"{leftover.name}  unfinished")
    if not catalog.valid and not catalog.skipped:
        _print(f"no checkpoint in {root}")
    return code


def verify_all(options: Namespace) -> int:
    """Print each thing that is wrong with a checkpoint."""
    path, found = resolve(options.path), []
    with Bar("verify") as bar:
        for problem in problems(path, fast=options.fast, progress=bar):
            found.append(_problem(problem))
            if not options.json:
                _print(f"{type(problem).__name__}: {problem}")
    if found:
        if options.json:
            _json(path=str(path), good=False, problems=found)
        else:
            _print(f"{path}: {len(found)} problems")
        return BAD
    good = summary(open_checkpoint(path).manifest)
    if options.json:
        numbers = {"arrays": good.arrays, "chunks": good.chunks, "bytes": good.nbytes}
        return _json(path=str(path), good=True, problems=[], **numbers)
    how = "lengths and checksums good" if options.fast else "all good"
    _print(f"{path}: {good.arrays} arrays, {good.chunks} chunks, {size(good.nbytes)}, {how}")
    return OK


def diff(options: Namespace) -> int:
    """Print what differs between two checkpoints."""
    first, second = resolve(options.a), resolve(options.b)
    with Bar("diff") as bar:
        found = compare(first, second, values=options.values, progress=bar)
    if options.json:
        _json(
            first=str(first),
            second=str(second),
            same=found.same,
            equal=found.equal,
            differences=[difference.to_json() for difference in found.differences],
            state=list(found.state),
        )
        return OK if found.same else BAD
    for difference in found.differences:
        _print(_difference(difference))
    for key in found.state:
        _print(f"state.{key}")
    unlike = f"{len(found.differences)} differ" if found.differences else "none differs"
    _print(f"{found.equal} arrays are the same, {unlike}")
    return OK if found.same else BAD


def export(options: Namespace) -> int:
    """Make a Hugging Face folder, or one safetensors file, of a checkpoint."""
    path, config = resolve(options.path), _config(options.config)
    with Bar("export") as bar:
        if options.format == "safetensors":
            if config is not None or options.skip:
                raise ValueError("--config and --skip are for --format hf")
            out = export_safetensors(path, options.out, options.dtype)
        else:
            out = export_hf(
                path, options.out, config=config, dtype=options.dtype, skip=options.skip,
                file_bytes=int(options.file_gib * 2**30), progress=bar,
            )  # fmt: skip
    if options.json:
        return _json(path=str(path), out=str(out), dtype=options.dtype, bytes=size_of(out))
    _print(f"{out}: {size(size_of(out))}, {options.dtype}, from {path}")
    return OK


def import_model(options: Namespace) -> int:
    """Make a checkpoint of a Hugging Face folder."""
    with Bar("import") as bar:
        path = import_hf(
            options.source, options.root, step=options.step, config=_config(options.config),
            moments=options.moments, skip=options.skip, overwrite=options.overwrite, progress=bar,
        )  # fmt: skip
    good = summary(open_checkpoint(path).manifest)
    if options.json:
        return _json(path=str(path), step=good.step, arrays=good.arrays, bytes=good.nbytes)
    _print(f"{path}: {good.arrays} arrays, {size(good.nbytes)}, from {options.source}")
    return OK


def gc(options: Namespace) -> int:
    """Delete what a run does not need any more."""
    found = collect(
        options.root, keep=options.keep, damaged=options.damaged, dry_run=options.dry_run
    )
    if options.json:
        return _json(
            root=str(options.root),
            dry_run=options.dry_run,
            bytes=found.nbytes,
            deleted=[
                {"path": str(path), "reason": reason, "bytes": nbytes}
                for path, reason, nbytes in found.garbage
            ],
            kept=[str(path) for path in found.kept],
        )
    for path, reason, nbytes in found.garbage:
        _print(f"{path.name}  {size(nbytes)}  {reason}")
    what = "would be deleted" if options.dry_run else "deleted"
    _print(f"{len(found.garbage)} {what}, {size(found.nbytes)}; {len(found.kept)} kept")
    return OK


def resolve(path: Place) -> Place:
    """Return the newest checkpoint if ``path`` is a run, else ``path``."""
    if step_of(path.name) is None and (catalog := scan(path)).valid:
        return catalog.valid[0].path
    return path


def size(nbytes: int) -> str:
    """Return a number of bytes for people.

    Examples:
        >>> size(0), size(1536), size(5 << 30)
        ('0 bytes', '1.5 KiB', '5 GiB')
    """
    power = min(3, int(math.log(nbytes, 1024))) if nbytes else 0
    return f"{nbytes / 1024**power:.3g} {['bytes', 'KiB', 'MiB', 'GiB'][power]}"


def _config(file: str | None) -> Any:
    return None if file is None else json.loads(Path(file).read_bytes())


def _difference(difference: Difference) -> str:
    if difference.elements is not None:
        how = f"{difference.elements} values, by up to {difference.largest:.3g}"
        return f"{difference.label}  {how} (relative {difference.relative:.3g})"
    if difference.first is not None:
        return f"{difference.label}  {difference.what} {difference.first} and {difference.second}"
    return f"{difference.label}  {difference.what}"


def _array(info: TensorInfo) -> dict[str, Any]:
    if info.packed:
        where: dict[str, Any] = {"pack": int(info.array.kind), "start": info.start}
    else:
        where = {"chunk": list(info.array.grid.chunk), "chunks": len(info.array.grid)}
    return {
        "name": info.name,
        "kind": info.kind,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "bytes": info.nbytes,
        "digest": info.digest,
        **where,
    }


def _problem(error: CheckpointError) -> dict[str, Any]:
    return {"class": type(error).__name__, "message": str(error), **error.details}


def _json(**value: Any) -> int:
    _print(json.dumps(value, indent=1))
    return OK


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
