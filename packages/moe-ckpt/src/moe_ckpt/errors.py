"""What can go wrong, one class for each thing that a caller may want to treat apart."""

from typing import Any


class CheckpointError(Exception):
    """Base of every error of this package.

    Attributes:
        details: The facts of the message as JSON values: ``tensor``, ``chunk``, ``file``.
    """

    def __init__(self, message: str, **details: Any):
        super().__init__(message)
        self.details = details


class ShardError(CheckpointError, ValueError):
    """A shard cannot be saved or loaded as it was given: dtype, device, length, name."""


class CoverageError(CheckpointError, ValueError):
    """The shards of all ranks leave out a part of a tensor, or hold a part twice."""


class HostMemoryError(CheckpointError, MemoryError):
    """A snapshot needs more host memory than it may take. ``details`` has nbytes and limit."""


class StateError(CheckpointError, ValueError):
    """The state is not JSON, or has other keys on another rank."""


class RankMismatchError(CheckpointError, ValueError):
    """The ranks called with arguments that do not fit together."""


class StepExistsError(CheckpointError, FileExistsError):
    """The step is there already and ``overwrite`` was not asked for."""


class RootLockedError(CheckpointError, RuntimeError):
    """Another process is saving to this root."""


class RankFailedError(CheckpointError, RuntimeError):
    """A rank met an error that is not of this package: a full disk, a permission, a bug.

    Attributes:
        details: ``rank`` and ``error``, the name of its class. On that rank ``__cause__`` is it.
    """


class CheckpointNotFound(CheckpointError, FileNotFoundError):  # noqa: N818, reads as a sentence
    """There is no checkpoint, or not of this step."""


class NotACheckpointError(CheckpointError, ValueError):
    """The path holds no ``manifest.json``."""


class FormatVersionError(CheckpointError, ValueError):
    """The checkpoint was written in a format that this release does not read."""


class TensorError(CheckpointError):
    """Base of: the checkpoint is sound, but it is not what the caller loads it into."""


class MissingTensorError(TensorError, KeyError):
    """A shard asks for a tensor that the checkpoint does not hold."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would escape quotes and newlines.
        return self.args[0]


class ExtraTensorError(TensorError):
    """The checkpoint holds a tensor that no shard on any rank asks for."""


class LayoutError(CheckpointError, ValueError):
    """A model is not kept as its family keeps models, or the family is not known."""


class RenameError(TensorError, ValueError):
    """A rule of ``rename`` cannot be followed."""


class ShapeMismatchError(TensorError, ValueError):
    """The tensor has another shape in the checkpoint."""


class DtypeMismatchError(TensorError, TypeError):
    """The tensor has another dtype in the checkpoint."""


class DamageError(CheckpointError):
    """Base of: the bytes on disk are not those that were written."""


class CorruptFileError(DamageError):
    """A manifest, state, checksum or metadata file is damaged, missing or foreign."""


class ChunkError(DamageError):
    """Base of: one chunk of a tensor is bad. ``details`` has tensor, kind, chunk and file."""


class MissingChunkError(ChunkError):
    """The file of a chunk is not there."""


class TruncatedChunkError(ChunkError):
    """The file of a chunk has the wrong length."""


class CorruptChunkError(ChunkError):
    """The bytes of a chunk do not give its checksum."""


class SwappedChunkError(ChunkError):
    """A chunk is sound in itself but is not the one that was written here."""


class PeerStoppedError(CheckpointError):
    """A peer sent less than agreed because it failed first. Its own error is the one raised."""


_CLASSES = {
    name: value
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, CheckpointError)
}


def pack(error: BaseException, rank: int) -> dict[str, Any]:
    """Describe an error as JSON, so that other ranks can raise it too."""
    name, details = type(error).__name__, getattr(error, "details", {})
    if isinstance(error, CheckpointError):
        return {"class": name, "message": str(error), "details": details, "rank": rank}
    details = {"rank": rank, "error": name}
    return {"class": "RankFailedError", "message": f"{name}: {error}", "details": details}


def unpack(packed: dict[str, Any], prefix: str = "") -> CheckpointError:
    """Make the error that ``pack`` described."""
    return _CLASSES[packed["class"]](prefix + packed["message"], **packed["details"])
