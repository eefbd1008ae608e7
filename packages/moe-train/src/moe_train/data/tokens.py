"""Token ids of documents, one after another, in memory or in files."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_train.corpus import CorpusError


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of documents, one after another. No document is in two pieces.

    Attributes:
        pieces: Arrays of unsigned integers; memory-mapped ones are read where they are needed.
        ends: For each piece, int64, where its documents end, counted from its beginning.
        vocab_size: Every id is below.
        num_bytes: Bytes of the text that the tokens stand for.
        origin: What errors call the place that they come from.
    """

    pieces: tuple[NDArray[Any], ...]
    ends: tuple[NDArray[np.int64], ...]
    vocab_size: int
    num_bytes: int
    origin: str

    def __len__(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    @property
    def num_documents(self) -> int:
        return sum(len(ends) for ends in self.ends)

    @property
    def bytes_per_token(self) -> float:
        """Divide nats a token by this for nats a byte."""
        return self.num_bytes / max(1, len(self))

    def document(self, number: int) -> tuple[int, int]:
        """Return where a document begins and ends, counted over all pieces."""
        begin = 0
        for piece, ends in zip(self.pieces, self.ends, strict=True):
            if number < len(ends):
                start = int(ends[number - 1]) if number else 0
                return begin + start, begin + int(ends[number])
            number, begin = number - len(ends), begin + len(piece)
        raise IndexError(f"{self.origin} has {self.num_documents} documents")

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the ids of positions ``start`` to ``stop - 1``, counted over all pieces."""
        return self.rows(np.asarray([start], dtype=np.int64), stop - start)[0]

    def rows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Return ``length`` ids from each start on, int64 ``[len(starts), length]``.

        Raises:
            CorpusError: If an id is not below ``vocab_size``: the file is not what it was.
        """
        if len(self.pieces) == 1:
            ids = self.pieces[0][starts[:, None] + np.arange(length)].astype(np.int64)
        else:
            ids = np.empty((len(starts), length), np.int64)
            for row, start in zip(ids, starts.tolist(), strict=True):
                self._fill(row, start)
        if ids.size and ids.max() >= self.vocab_size:
            row, column = np.argwhere(ids >= self.vocab_size)[0]
            raise CorpusError(
                f"{self.origin}: token {starts[row] + column} is {ids[row, column]}, and the "
                f"vocabulary has {self.vocab_size}"
            )
        return ids

    def _fill(self, row: NDArray[np.int64], start: int) -> None:
        """Copy from ``start`` on, over the border of one piece to the next."""
        done = 0
        for piece in self.pieces:
            if done < len(row) and start < len(piece):
                part = piece[start : start + len(row) - done]
                row[done : done + len(part)] = part
                done += len(part)
            start = max(0, start - len(piece))
