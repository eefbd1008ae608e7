"""Sequences of whole documents: none is cut that fits, and none sees another.

A document of n tokens has n - 1 predictions: each token but the last predicts the next. One with
more than S of them is cut into parts of S, which lose no prediction. Parts are laid into rows of S
places: within each block of parts, in the order of the text, the longest first, each into the
fullest row that has room (best fit). With S = 6 and documents of 4, 8 and 3 tokens::

    predictions    abc | defghi j | kl
    rows           defghi    abckl.  j.....      lower-case letters predict, dots are padding
    document       000000    000112  011111
"""

import os
from bisect import bisect_left, insort
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray

from moe_train.corpus import CorpusError
from moe_train.data.batch import IGNORED, Batch
from moe_train.data.order import visiting_order
from moe_train.data.sequences import evenly
from moe_train.data.tokens import Tokens

_BLOCK = 8192
_VERSION = 1


class PackedSequences:
    """Rows of whole documents, with padding where none fits.

    Args:
        tokens: The documents.
        length: S, places of a row.
        cache: Where the index of the rows is kept, to be mapped at the next start; None to make
            it in memory.
        identity: Changes whenever the documents do, for the cache.

    Raises:
        CorpusError: If no document has two tokens.
    """

    def __init__(self, tokens: Tokens, length: int, cache: Path | None = None, identity: str = ""):
        self.tokens, self.length = tokens, length
        if cache is None:
            self._starts, self._parts = _index(tokens, length)
        else:
            self._starts, self._parts = _cached(tokens, length, cache, identity)
        self.count = len(self._starts) - 1
        if self.count < 1:
            raise CorpusError(f"no document of {tokens.origin} has two tokens")

    @property
    def fill(self) -> float:
        """The fraction of all places that predict something."""
        predictions = len(self.tokens) - self.tokens.num_documents
        return predictions / (self.count * self.length)

    def order(self, first: int, number: int, seed: int) -> NDArray[np.int64]:
        """Return which rows are at positions ``first`` to ``first + number - 1``."""
        return visiting_order(first, number, self.count, seed)

    def batch(self, numbers: NDArray[np.int64], device: torch.device | None = None) -> Batch:
        """Return the rows of these numbers, each in ``0..count-1``."""
        inputs = np.zeros((len(numbers), self.length), np.int64)
        targets = np.full((len(numbers), self.length), IGNORED, np.int64)
        documents = np.zeros((len(numbers), self.length), np.int32)
        valid, counts = np.zeros((2, len(numbers)), np.int64)
        for row, number in enumerate(numbers.tolist()):
            begin, end = self._starts[number], self._starts[number + 1]
            at = 0
            for document, (start, size) in enumerate(self._parts[begin:end].tolist()):
                ids = self.tokens.read(start, start + size + 1)
                inputs[row, at : at + size] = ids[:-1]
                targets[row, at : at + size] = ids[1:]
                documents[row, at : at + size] = document
                at += size
            documents[row, at:] = end - begin  # padding is a document of its own
            valid[row], counts[row] = at, end - begin + (at < self.length)
        return Batch(
            torch.from_numpy(inputs).to(device),
            torch.from_numpy(targets).to(device),
            True,
            torch.from_numpy(documents).to(device),
            valid,
            counts,
        )

    def num_tokens(self, numbers: NDArray[np.int64]) -> int:
        """Return how many predictions the rows of these numbers have."""
        spans = zip(self._starts[numbers].tolist(), self._starts[numbers + 1].tolist(), strict=True)
        return sum(int(self._parts[begin:end, 1].sum()) for begin, end in spans)

    def spread(self, number: int) -> NDArray[np.int64]:
        """Return up to ``number`` row numbers, evenly spread over the text."""
        return evenly(number, self.count)


def _index(tokens: Tokens, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lay all parts into rows.

    Returns:
        int64 ``[rows + 1]``, the first part of each row, and int64 ``[parts, 2]``, where in the
        text a part begins and how many predictions it has.
    """
    starts, laid, begun = [np.zeros(1, np.int64)], [np.zeros((0, 2), np.int64)], 0
    for parts in _parts(tokens, length):
        row = _best_fit(parts[:, 1], length)
        order = np.argsort(row, kind="stable")  # within a row, as in the text
        laid.append(parts[order])
        starts.append(begun + np.cumsum(np.bincount(row)))
        begun += len(parts)
    return np.concatenate(starts), np.concatenate(laid)


def _parts(tokens: Tokens, length: int) -> Iterator[NDArray[np.int64]]:
    """Yield the parts of all documents in blocks, in the order of the text, whatever the files."""
    waiting = np.zeros((0, 2), np.int64)
    for starts, predictions in _documents(tokens):
        pieces = -(-predictions // length)  # 0 for a single token, which predicts nothing
        document = np.repeat(np.arange(len(starts)), pieces)
        nth = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        sizes = np.minimum(predictions[document] - nth * length, length)
        parts = np.stack([starts[document] + nth * length, sizes], axis=1)
        waiting = np.concatenate([waiting, parts])
        whole = len(waiting) // _BLOCK * _BLOCK
        for i in range(0, whole, _BLOCK):
            yield waiting[i : i + _BLOCK]
        waiting = waiting[whole:]
    if len(waiting):
        yield waiting


def _documents(tokens: Tokens) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield where documents begin and how many predictions each has, some at a time."""
    begin = 0
    for piece, ends in zip(tokens.pieces, tokens.ends, strict=True):
        for at in range(0, len(ends), _BLOCK):
            stops = np.asarray(ends[at : at + _BLOCK], np.int64)
            starts = np.concatenate([[int(ends[at - 1]) if at else 0], stops[:-1]])
            yield begin + starts, stops - starts - 1
        begin += len(piece)


def _best_fit(sizes: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Return the row of each part: the longest first, each into the fullest row with room."""
    row_of = np.empty(len(sizes), np.int64)
    rooms: list[tuple[int, int]] = []  # of rows that are not full: places left, row
    rows = 0
    for part in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[part])
        at = bisect_left(rooms, (size, 0))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row, rows = length, rows, rows + 1
        row_of[part] = row
        if room > size:
            insort(rooms, (room - size, row))
    return row_of


def _cached(
    tokens: Tokens, length: int, cache: Path, identity: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Map the index of an earlier start, or make it. Several ranks may do so at once."""
    key = sha256(f"{_VERSION} {_BLOCK} {length} {identity}".encode()).hexdigest()[:16]
    paths = [cache / f"{key}-{name}.npy" for name in ("rows", "parts")]
    if not all(path.exists() for path in paths):
        cache.mkdir(parents=True, exist_ok=True)
        for path, array in zip(paths, _index(tokens, length), strict=True):
            _save(path, array)
    starts, parts = (np.load(path, mmap_mode="r") for path in paths)
    return starts, parts


def _save(path: Path, array: NDArray[Any]) -> None:
    """Write a file whole or not at all; of several writers the last one stays."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    with partial.open("wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
