"""FP32 checkpoints on tensorstore that know no topology."""

from moe_ckpt.background import AsyncSaver
from moe_ckpt.catalog import Catalog, Checkpoint, Skipped, find_latest, scan
from moe_ckpt.collection import Collected, Garbage, collect
from moe_ckpt.comm import Alone, Communicator
from moe_ckpt.comparison import Comparison, Difference, compare
from moe_ckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    ChunkError,
    CorruptChunkError,
    CorruptFileError,
    CoverageError,
    DamageError,
    DtypeMismatchError,
    ExtraTensorError,
    FormatVersionError,
    HostMemoryError,
    LayoutError,
    MissingChunkError,
    MissingTensorError,
    NotACheckpointError,
    RankFailedError,
    RankMismatchError,
    RenameError,
    RootLockedError,
    ShapeMismatchError,
    ShardError,
    StateError,
    StepExistsError,
    SwappedChunkError,
    TensorError,
    TruncatedChunkError,
)
from moe_ckpt.export import export_safetensors
from moe_ckpt.grid import chunk_shape
from moe_ckpt.hf import export_hf, import_hf
from moe_ckpt.loader import Loaded, load
from moe_ckpt.objects import ObjectPath, as_place
from moe_ckpt.reader import CheckpointReader, Verified, open_checkpoint, problems, verify
from moe_ckpt.shard import Shard
from moe_ckpt.snapshot import HostArena, HostBuffer, Snapshot
from moe_ckpt.writer import save

__all__ = [
    "Alone",
    "AsyncSaver",
    "Catalog",
    "Checkpoint",
    "CheckpointError",
    "CheckpointNotFound",
    "CheckpointReader",
    "ChunkError",
    "Collected",
    "Communicator",
    "Comparison",
    "CorruptChunkError",
    "CorruptFileError",
    "CoverageError",
    "DamageError",
    "Difference",
    "DtypeMismatchError",
    "ExtraTensorError",
    "FormatVersionError",
    "Garbage",
    "HostArena",
    "HostBuffer",
    "HostMemoryError",
    "LayoutError",
    "Loaded",
    "MissingChunkError",
    "MissingTensorError",
    "NotACheckpointError",
    "ObjectPath",
    "RankFailedError",
    "RankMismatchError",
    "RenameError",
    "RootLockedError",
    "ShapeMismatchError",
    "Shard",
    "ShardError",
    "Skipped",
    "Snapshot",
    "StateError",
    "StepExistsError",
    "SwappedChunkError",
    "TensorError",
    "TruncatedChunkError",
    "Verified",
    "as_place",
    "chunk_shape",
    "collect",
    "compare",
    "export_hf",
    "export_safetensors",
    "find_latest",
    "import_hf",
    "load",
    "open_checkpoint",
    "problems",
    "save",
    "scan",
    "verify",
]
