"""The record that makes a directory a checkpoint, and the small files that it vouches for."""

import hashlib
import importlib.metadata
import json
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from moe_ckpt.array import ArrayInfo
from moe_ckpt.errors import CorruptFileError, FormatVersionError, NotACheckpointError, StateError
from moe_ckpt.objects import Place
from moe_ckpt.rows import TensorInfo, pack_row, read_rows, rows_of

_ENCODER = json.JSONEncoder(allow_nan=False)
VERSION = (1, 0)
PRODUCERS = ("moe-ckpt", "numpy", "tensorstore")
MANIFEST, SEAL, STATE, CHECKSUMS = "manifest.json", "manifest.sha256", "state.json", "checksums.bin"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: Of the run.
        sequence: Counts the saves to one root; the highest is the newest.
        writer: Package and version that wrote it.
        tensors: In order of name and kind.
        arrays: That hold them: those of large tensors, in the same order, then the packs.
        sha256: Of the file, in hexadecimal.
        config_sha256: Of the value of ``config`` in the state, or None if the state has none.
        producers: Versions of the packages that the bytes came from.
    """

    step: int
    sequence: int
    writer: str
    tensors: tuple[TensorInfo, ...]
    arrays: tuple[ArrayInfo, ...]
    sha256: str
    config_sha256: str | None
    producers: dict[str, str]


def sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def to_json(value: Any) -> bytes:
    """Return the one way in which this package writes JSON."""
    return json.dumps(value, allow_nan=False, indent=1, sort_keys=True).encode() + b"\n"


def state_bytes(state: Any) -> bytes:
    """Return the contents of ``state.json``.

    Raises:
        StateError: If a value would not come back as it went in. Tuples come back as lists.
    """
    if not isinstance(state, dict) and not hasattr(state, "keys"):
        raise StateError(f"state must be a mapping, it is a {type(state).__name__}")
    return to_json(_plain(state, "state"))


def _plain(value: Any, where: str) -> Any:
    if hasattr(value, "keys"):
        for key in value:
            if not isinstance(key, str):
                raise StateError(f"{where}: key {key!r} is a {type(key).__name__}, JSON needs str")
        return {key: _plain(value[key], f"{where}.{key}") for key in value}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{at}]") for at, item in enumerate(value)]
    if isinstance(value, float) and not np.isfinite(value):
        raise StateError(f"{where} is {value}, which JSON cannot hold")
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise StateError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def small_files(
    step: int, sequence: int, arrays: list[ArrayInfo], state: bytes
) -> dict[str, bytes]:
    """Return the files beside ``arrays``, in the order in which to write them."""
    checksums = b"".join(info.crcs.astype("<u4").tobytes() for info in arrays)
    manifest = {
        "config_sha256": _config_digest(state),
        "checksums": {"bytes": len(checksums), "sha256": sha256(checksums)},
        "format": "moe-ckpt",
        "packs": [pack_row(info) for info in arrays if info.members],
        "producers": producers(),
        "sequence": sequence,
        "state": {"bytes": len(state), "sha256": sha256(state)},
        "step": step,
        "version": list(VERSION),
        "writer": f"moe-ckpt {_version('moe-ckpt')}",
    }
    # A line for each tensor. Rows that are indented would take most of the time of a save.
    rows = sorted((row for info in arrays for row in rows_of(info)), key=itemgetter(0, 1))
    lines = ",\n  ".join(_ENCODER.encode(row) for _, _, row in rows)
    text = to_json(manifest).decode().removeprefix("{")
    data = f'{{\n "arrays": [\n  {lines}\n ],{text}'.encode()
    # As sha256sum writes it, so that it can also check it.
    seal = f"{sha256(data)}  {MANIFEST}\n".encode()
    return {STATE: state, CHECKSUMS: checksums, SEAL: seal, MANIFEST: data}


def read_manifest(path: Place) -> Manifest:
    """Read and check the manifest of a checkpoint and the checksums it vouches for.

    Raises:
        NotACheckpointError: If there is no manifest.
        FormatVersionError: If it was written in a format that this release does not read.
        CorruptFileError: If a byte of it, of its seal, of the state or the checksums has changed.
    """
    try:
        data = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotACheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}") from error
    seal = f"{sha256(data)}  {MANIFEST}\n".encode()
    if _read(path / SEAL) != seal:
        raise _corrupt(path / MANIFEST, f"does not have the SHA-256 in {SEAL}")
    try:
        fields = json.loads(data)
        _check_version(path, fields)
        checksums = read_sealed(path / CHECKSUMS, fields["checksums"])
        read_sealed(path / STATE, fields["state"])
        tensors, arrays = read_rows(
            fields["arrays"], fields["packs"], np.frombuffer(checksums, "<u4")
        )
        return Manifest(
            fields["step"], fields["sequence"], fields["writer"], tensors, arrays, sha256(data),
            fields.get("config_sha256"), fields.get("producers", {}),
        )  # fmt: skip
    except (LookupError, TypeError, ValueError) as error:
        if isinstance(error, FormatVersionError):
            raise
        raise _corrupt(path / MANIFEST, f"cannot be understood: {error!r}") from error


def read_state(path: Place) -> dict[str, Any]:
    """Read the state of a checkpoint whose manifest has been checked."""
    return json.loads(_read(path / STATE))


def read_sealed(path: Place, seal: dict[str, Any]) -> bytes:
    """Read a file and compare its length and SHA-256 with what the manifest says."""
    data = _read(path)
    if len(data) != seal["bytes"]:
        raise _corrupt(path, f"has {len(data)} bytes, the manifest says {seal['bytes']}")
    if sha256(data) != seal["sha256"]:
        raise _corrupt(path, "does not have the SHA-256 that the manifest says")
    return data


def _read(path: Place) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise _corrupt(path, "is missing") from error


def _corrupt(path: Place, what: str) -> CorruptFileError:
    return CorruptFileError(f"{path} {what}", file=str(path))


def _config_digest(state: bytes) -> str | None:
    # Equal configurations can be told without comparing them; whose they are is not known here.
    config = json.loads(state).get("config")
    return None if config is None else sha256(to_json(config))


def producers() -> dict[str, str]:
    """Return the versions of the packages that the bytes of a checkpoint come from."""
    return {name: _version(name) for name in PRODUCERS}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "from a source tree"  # on PYTHONPATH, not installed


def _check_version(path: Place, fields: dict[str, Any]) -> None:
    if fields["format"] != "moe-ckpt" or fields["version"][0] != VERSION[0]:
        raise FormatVersionError(
            f"{path} has format {fields['format']} version {fields['version']}, "
            f"this release reads moe-ckpt version {VERSION[0]}.x"
        )
