"""Chunks as objects: the same bytes as in files, each read and written whole."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorstore as ts

from moe_ckpt.array import (
    CRC_BYTES,
    WINDOW_BYTES,
    ArrayInfo,
    chunk_details,
    chunk_label,
    corrupt,
    metadata,
    swapped,
)
from moe_ckpt.errors import MissingChunkError, TruncatedChunkError
from moe_ckpt.objects import ObjectPath


class Codec:
    """Turns chunks of one array into bytes and back, checksum included, by tensorstore in memory.

    Args:
        info: Of the array.
    """

    def __init__(self, info: ArrayInfo):
        # A context of its own: nobody else sees what is in it.
        context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        kvstore = {"driver": "memory"}
        self.info, self._store = info, ts.KvStore.open(kvstore, context=context).result()
        spec = {
            "driver": "zarr3",
            "kvstore": kvstore,
            "metadata": metadata(info),
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
        }
        self._array = ts.open(spec, open=True, assume_metadata=True, context=context).result()

    def encode(self, number: int, values: np.ndarray) -> bytes:
        """Return the bytes of a chunk; the last four are the checksum of the others."""
        box, key = self.info.grid.box(number), self.key(number)
        self._array[box] = values.reshape([part.stop - part.start for part in box])
        data = self._store[key]
        del self._store[key]
        return data

    def decode(self, number: int, data: bytes) -> np.ndarray:
        """Return the values of a chunk.

        Raises:
            ValueError: If the bytes do not give their checksum.
        """
        key = self.key(number)
        self._store[key] = data
        try:
            return np.asarray(self._array[self.info.grid.box(number)].read().result()).reshape(-1)
        finally:
            del self._store[key]

    def key(self, number: int) -> str:
        """Return the name of a chunk in its array."""
        return ".".join(["c", *map(str, self.info.grid.index(number))])


class ObjectWriter:
    """Writes whole chunks and holds at most a window of them in flight.

    Args:
        checkpoint: Place that holds ``arrays``.
    """

    def __init__(self, checkpoint: ObjectPath):
        self.checkpoint = checkpoint
        self._codec: Codec | None = None
        self._crcs: dict[Any, int] = {}
        self._flying: deque[tuple[Any, int]] = deque()
        self._bytes = 0  # of what is in flight

    def write(self, info: ArrayInfo, number: int, values: np.ndarray) -> None:
        """Start to write a chunk. ``values`` may change when this returns."""
        if self._codec is None or self._codec.info is not info:
            self._codec = Codec(info)
        data = self._codec.encode(number, values)
        crc = int.from_bytes(data[-CRC_BYTES:], "little")
        self._crcs[info.chunk_file(self.checkpoint, number)] = crc
        place = info.chunk_file(self.checkpoint, number)
        self._flying.append((place.store.write(place.key, data), len(data)))
        self._bytes += len(data)
        while self._bytes > WINDOW_BYTES:
            self._land()

    def wait(self) -> None:
        """Return when the store has every chunk."""
        while self._flying:
            self._land()

    def _land(self) -> None:
        future, size = self._flying.popleft()
        self._bytes -= size
        future.result()

    def finish(self) -> None:
        """Do nothing: what a store has taken is durable."""

    def drain(self) -> None:
        """Return when nothing is being written any more, whether it succeeded or not."""
        for future, _ in self._flying:
            future.exception()
        self._flying.clear()
        self._bytes = 0

    def stored_crc(self, info: ArrayInfo, number: int) -> int:
        """Return the checksum of a chunk that was written: the store took it whole."""
        return self._crcs[info.chunk_file(self.checkpoint, number)]


def read_objects(
    checkpoint: ObjectPath, info: ArrayInfo, numbers: Iterable[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield chunks as flat arrays, each checked against the manifest before it is yielded.

    Raises:
        ChunkError: Of the class that says what is wrong with the first bad chunk.
    """
    codec, flying = Codec(info), []
    most = max(1, WINDOW_BYTES // info.chunk_bytes)
    for number in numbers:
        place = info.chunk_file(checkpoint, number)
        flying.append((number, place, place.store.read(place.key)))
        if len(flying) >= most:
            yield _finish(codec, checkpoint, *flying.pop(0))
    for item in flying:
        yield _finish(codec, checkpoint, *item)


def _finish(
    codec: Codec, checkpoint: ObjectPath, number: int, place: ObjectPath, future: Any
) -> tuple[int, np.ndarray]:
    info, found = codec.info, future.result()
    label, details = chunk_label(info, number), chunk_details(info, number, place)
    if found.state != "value":
        raise MissingChunkError(f"{label}: {place} is missing", **details)
    data = found.value
    if len(data) != info.chunk_bytes:
        raise TruncatedChunkError(
            f"{label}: {place} has {len(data)} bytes, a chunk has {info.chunk_bytes}", **details
        )
    try:
        values = codec.decode(number, data)
    except ValueError as error:
        raise corrupt(checkpoint, info, number) from error
    crc = int.from_bytes(data[-CRC_BYTES:], "little")
    if crc != info.crcs[number]:
        raise swapped(checkpoint, info, number, crc, " is sound but")
    return number, values


def stored_object_crc(checkpoint: ObjectPath, info: ArrayInfo, number: int) -> int:
    """Return the checksum at the end of a chunk, in two requests for four bytes.

    Raises:
        MissingChunkError: If there is no object.
        TruncatedChunkError: If it has not the length of a chunk.
    """
    place = info.chunk_file(checkpoint, number)
    label, details = chunk_label(info, number), chunk_details(info, number, place)
    try:
        end = place.read_part(slice(info.chunk_bytes - CRC_BYTES, info.chunk_bytes))
        if place.read_part(slice(-CRC_BYTES, None)) != end:
            raise EOFError
    except EOFError:
        raise TruncatedChunkError(
            f"{label}: {place} has not the {info.chunk_bytes} bytes of a chunk", **details
        ) from None
    except FileNotFoundError as error:
        raise MissingChunkError(f"{label}: {place} is missing", **details) from error
    return int.from_bytes(end, "little")
