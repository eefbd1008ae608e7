"""Tokenizers: bytes, which need nothing, and any file of the library ``tokenizers``."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_train.corpus import CorpusError

NUM_BYTES = 256


class Tokenizer(Protocol):
    """Between text and token ids.

    Attributes:
        vocab_size: Every id is below.
        digest: SHA-256 of the tokenizer's file; ``"bytes"`` for bytes.
        eos: Id that ends a document; None if nothing does.
    """

    vocab_size: int
    digest: str
    eos: int | None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Return the ids of each text, without the one that ends a document."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return text for people: what cannot be decoded is replaced."""
        ...


class ByteTokenizer:
    """Each byte is a token. A zero byte ends a document.

    Args:
        eos: Whether anything ends a document.

    Examples:
        >>> ByteTokenizer().encode([b"ab"])[0].tolist()
        [97, 98]
        >>> ByteTokenizer().decode([97, 98, 300])
        'ab�'
    """

    def __init__(self, eos: bool = True):
        self.vocab_size, self.digest, self.eos = NUM_BYTES, "bytes", 0 if eos else None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Return the bytes of each text."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return text for people. What is no byte, or not UTF-8, is replaced."""
        # 0xff is never UTF-8, so it is replaced in its turn.
        return bytes(i if i < NUM_BYTES else 0xFF for i in ids).decode(errors="replace")


class FileTokenizer:
    """A tokenizer of the library ``tokenizers``, from its file ``tokenizer.json``.

    Args:
        path: The file.
        eos: Name of the token that ends a document, such as ``</s>``; None for none.

    Raises:
        CorpusError: If the library is missing, the file cannot be read or has no such token.
    """

    def __init__(self, path: Path, eos: str | None = None):
        try:
            from tokenizers import Tokenizer as Reader  # noqa: PLC0415 - an optional dependency
        except ImportError as error:
            raise CorpusError(
                f"{path} needs the library tokenizers: pip install 'moe-train[tokenizers]'"
            ) from error
        try:
            self.content = path.read_bytes()
        except OSError as error:
            raise CorpusError(f"cannot read the tokenizer {path}: {error.strerror}") from error
        try:
            self._reader = Reader.from_str(self.content.decode())
        except Exception as error:  # the library raises plain Exception
            raise CorpusError(f"{path} is not a file of tokenizers: {error}") from error
        self._reader.no_truncation()
        self._reader.no_padding()
        ids = self._reader.get_vocab(with_added_tokens=True).values()
        self.path, self.vocab_size = path, max(ids, default=-1) + 1
        if not self.vocab_size:
            raise CorpusError(f"the tokenizer {path} has no tokens")
        self.digest = sha256(self.content).hexdigest()
        self.eos = None if eos is None else self._id(eos)

    def _id(self, name: str) -> int:
        found = self._reader.token_to_id(name)
        if found is None:
            special = [t.content for t in self._reader.get_added_tokens_decoder().values()]
            raise CorpusError(
                f"the tokenizer {self.path} has no token {name!r}; its special tokens: "
                f"{', '.join(special[:8]) or 'none'}"
            )
        return found

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Return the ids of each text, which is UTF-8. No special tokens are added."""
        encoded = self._reader.encode_batch_fast(
            [text.decode() for text in texts], add_special_tokens=False
        )
        return [np.asarray(one.ids, np.uint32) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Return text for people, special tokens included."""
        return self._reader.decode([int(i) for i in ids], skip_special_tokens=False)
