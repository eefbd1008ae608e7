"""Token shards: a folder of token ids that are read where they lie, at a cost that has no size.

::

    folder/
      index.json          written last; without it the folder is half built
      tokenizer.json      what made the ids, unless they are bytes
      train-00000.bin     ids, little-endian, of the dtype in the index
      train-00000.ends    int64, little-endian: where each document ends, in tokens
      held_out-00000.bin  ...

No document is in two files. Opening reads the index and looks at the files' sizes, no more.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moe_train.corpus import CorpusError
from moe_train.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from moe_train.data.tokens import Tokens

INDEX, TOKENIZER, JOURNAL = "index.json", "tokenizer.json", "build.json"
FORMAT, VERSION = "moe-train tokens", 1
PARTS = ("train", "held_out")
DTYPES = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
END = np.dtype("<i8")
_BLOCK = 1 << 24


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One pair of files.

    Attributes:
        name: Of the files, without ``.bin`` and ``.ends``.
        tokens: Ids in it.
        documents: Documents in it.
        num_bytes: Bytes of the text that it stands for.
        sha256: Of the ids and then the ends.
    """

    name: str
    tokens: int
    documents: int
    num_bytes: int
    sha256: str

    @classmethod
    def read(cls, entry: dict[str, Any]) -> Self:
        """Check an entry of the index."""
        file = cls(**entry)
        counts = (file.tokens, file.documents, file.num_bytes)
        if not (
            isinstance(file.name, str)
            and re.fullmatch(r"[A-Za-z0-9_-]+", file.name)
            and all(type(count) is int and count >= 0 for count in counts)
            and file.tokens >= file.documents >= 1
            and isinstance(file.sha256, str)
        ):
            raise ValueError(f"{entry} does not describe a shard")
        return file


class Shards:
    """A folder of token shards, open for reading.

    Args:
        root: The folder.

    Raises:
        CorpusError: If it is not such a folder, is half built, or a file is not as the index says.
    """

    def __init__(self, root: Path):
        self.root = root
        index = _read_index(root)
        try:
            if (index["format"], index["version"]) != (FORMAT, VERSION):
                raise ValueError(f"format {index['format']!r} {index['version']!r}")
            self.dtype = DTYPES[index["dtype"]]
            self.vocab_size, self.origin = int(index["vocab_size"]), str(index["origin"])
            self._eos, self._made_by = _tokenizer(index["tokenizer"], self.vocab_size)
            self.files = {
                part: tuple(ShardFile.read(entry) for entry in index["parts"][part])
                for part in PARTS
            }
        except (KeyError, TypeError, ValueError) as error:
            raise CorpusError(
                f"{root / INDEX} is not an index of token shards of version {VERSION}: {error}"
            ) from error
        content = {key: value for key, value in index.items() if key != "origin"}
        self.digest = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def tokens(self, part: str) -> Tokens:
        """Map a part, ``train`` or ``held_out``, into memory."""
        files = self.files[part]
        pieces = [self._map(file, ".bin", self.dtype, file.tokens) for file in files]
        ends = [self._map(file, ".ends", END, file.documents) for file in files]
        for file, piece in zip(files, ends, strict=True):
            if piece[-1] != file.tokens:
                raise CorpusError(
                    f"{self.root / file.name}.ends ends at token {piece[-1]}, and the index "
                    f"says {file.tokens} tokens"
                )
        num_bytes = sum(file.num_bytes for file in files)
        return Tokens(tuple(pieces), tuple(ends), self.vocab_size, num_bytes, str(self.root))

    def tokenizer(self) -> Tokenizer:
        """Return what made the ids.

        Raises:
            CorpusError: If the file in the folder is not the one that made them.
        """
        if self._made_by == "bytes":
            return ByteTokenizer(self._eos is not None)
        tokenizer = FileTokenizer(self.root / TOKENIZER)
        if tokenizer.digest != self._made_by:
            raise CorpusError(
                f"{tokenizer.path} is not the tokenizer that made the shards: its SHA-256 is "
                f"{tokenizer.digest[:12]}…, the index says {self._made_by[:12]}…"
            )
        tokenizer.eos = self._eos
        return tokenizer

    def verify(self, progress: Callable[[int], None] = lambda size: None) -> None:
        """Read every byte and compare with the index.

        Args:
            progress: Called with the number of bytes, as they are read.

        Raises:
            CorpusError: If a file is not as it was written, or holds what no builder writes.
        """
        self.tokenizer()
        for part in PARTS:
            for file in self.files[part]:
                ids = self._map(file, ".bin", self.dtype, file.tokens)
                ends = self._map(file, ".ends", END, file.documents)
                found = _digest(ids, ends, progress)
                if found != file.sha256:
                    raise CorpusError(
                        f"{self.root / file.name} is damaged: its SHA-256 is {found[:12]}…, the "
                        f"index says {file.sha256[:12]}…"
                    )
                if (np.diff(ends, prepend=0) <= 0).any() or ends[-1] != file.tokens:
                    raise CorpusError(f"{self.root / file.name}.ends does not ascend")
                largest = max(int(block.max()) for block in _blocks(ids))
                if largest >= self.vocab_size:
                    raise CorpusError(
                        f"{self.root / file.name}.bin holds the id {largest}, and the vocabulary "
                        f"has {self.vocab_size}"
                    )

    def _map(self, file: ShardFile, end: str, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        path = self.root / (file.name + end)
        size = path.stat().st_size if path.is_file() else None
        if size != count * dtype.itemsize:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CorpusError(
                f"{path} {found}; the index says {count * dtype.itemsize} bytes, {count} of "
                f"{dtype.name}"
            )
        return np.memmap(path, dtype, "r", shape=(count,))


def _tokenizer(entry: dict[str, Any], vocab_size: int) -> tuple[int | None, str]:
    eos, digest = entry["eos"], entry["sha256"]
    if not isinstance(digest, str) or not (eos is None or type(eos) is int):
        raise ValueError(f"{entry} does not describe a tokenizer")
    if vocab_size < 1 or not (eos is None or 0 <= eos < vocab_size):
        raise ValueError(f"vocab_size {vocab_size}, and {eos} ends a document")
    return eos, digest


def is_shards(root: Path) -> bool:
    """Tell whether a folder holds token shards, whole or half built."""
    return any((root / name).is_file() and _claims(root / name) for name in (INDEX, JOURNAL))


def index_text(
    *, dtype: str, tokenizer: Tokenizer, origin: str, parts: dict[str, list[ShardFile]]
) -> str:
    """Return the text of the index of a folder."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "dtype": dtype,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": {"sha256": tokenizer.digest, "eos": tokenizer.eos},
            "origin": origin,
            "parts": {part: [asdict(file) for file in parts[part]] for part in PARTS},
        },
        indent=2,
    )


def _read_index(root: Path) -> dict[str, Any]:
    if not (root / INDEX).is_file():
        if (root / JOURNAL).is_file():
            raise CorpusError(
                f"{root} is half built: run `moe-train data build` with the same options again, "
                "and it goes on"
            )
        raise CorpusError(f"{root} holds no token shards: there is no {INDEX}")
    try:
        index = json.loads((root / INDEX).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorpusError(f"{root / INDEX} is not JSON: {error}") from error
    if not isinstance(index, dict):
        raise CorpusError(f"{root / INDEX} is not an index of token shards")
    return index


def _claims(path: Path) -> bool:
    """Tell whether a file calls itself ours in its first bytes: the names alone are common."""
    with path.open("rb") as file:
        return FORMAT.encode() in file.read(1 << 12)


def _blocks(array: NDArray[Any]) -> list[NDArray[Any]]:
    return [array[start : start + _BLOCK] for start in range(0, len(array), _BLOCK)]


def _digest(ids: NDArray[Any], ends: NDArray[Any], progress: Callable[[int], None]) -> str:
    digest = sha256()
    for array in (ids, ends):
        for block in _blocks(array):
            digest.update(block.data)
            progress(block.nbytes)
    return digest.hexdigest()
