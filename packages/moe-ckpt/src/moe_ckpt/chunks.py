"""Chunks wherever they are: in the files of a file system or in an object store."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from moe_ckpt import files
from moe_ckpt.array import ArrayInfo, ChunkWriter, read_files, stored_crc, swapped
from moe_ckpt.object_chunks import ObjectWriter, read_objects, stored_object_crc
from moe_ckpt.objects import ObjectPath, Place

SMALL_BYTES = 1 << 20
"""Chunks that are smaller, on the average, are made durable together where there are many."""


def chunk_writer(checkpoint: Place, sizes: Sequence[int]) -> ChunkWriter | ObjectWriter:
    """Return what writes chunks to a checkpoint.

    Args:
        checkpoint: Where.
        sizes: Bytes of the chunks that it will write.
    """
    if isinstance(checkpoint, ObjectPath):
        return ObjectWriter(checkpoint)
    many = len(sizes) > files.MANY and sum(sizes) < len(sizes) * SMALL_BYTES
    return ChunkWriter(checkpoint, together=many)


def read_chunks(
    checkpoint: Place, info: ArrayInfo, numbers: Iterable[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield chunks as flat arrays, each checked against the manifest before it is yielded.

    Raises:
        ChunkError: Of the class that says what is wrong with the first bad chunk.
    """
    if isinstance(checkpoint, ObjectPath):
        return read_objects(checkpoint, info, numbers)
    return read_files(checkpoint, info, numbers)


def check_stored(checkpoint: Place, info: ArrayInfo, number: int) -> None:
    """Compare the length and the last four bytes of a chunk with the manifest.

    Raises:
        ChunkError: Of the class that says what is wrong. A chunk with another checksum than the
            manifest says counts as another chunk, though the checksum itself may have been hit.
    """
    if isinstance(checkpoint, ObjectPath):
        crc = stored_object_crc(checkpoint, info, number)
    else:
        crc = stored_crc(checkpoint, info, number)
    if crc != info.crcs[number]:
        raise swapped(checkpoint, info, number, crc, "")
