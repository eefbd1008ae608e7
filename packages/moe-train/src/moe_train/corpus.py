"""Real text that is on every machine: the sources of Python's standard library, as bytes.

Files are split, not positions: a held-out file is never seen in training. The order of files is
that of the hash of their names, so the split depends on nothing but the names.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HELD_OUT_PERCENT = 10
COUNTED = 64 << 20
"""Bytes that the tables of counts are made of, at most: they are made at every start."""
_SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


class CorpusError(ValueError):
    """There is no text to train on. The message says what was looked for and where."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as bytes, in two parts.

    Attributes:
        train: uint8, the training files one after another, each ended by a zero byte.
        held_out: uint8, the held-out files, likewise.
        num_files: Files of the two parts.
        digest: SHA-256 of all names and contents.
        origin: Where the text came from, for people.
        train_ends: int64, where each training file ends, after its zero byte.
        held_out_ends: int64, the same of the held-out files.
    """

    train: NDArray[np.uint8]
    held_out: NDArray[np.uint8]
    num_files: tuple[int, int]
    digest: str
    origin: str
    train_ends: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    held_out_ends: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


def load_corpus(path: Path | None, suffix: str, exclude: Path | None = None) -> Corpus:
    """Read all files below a folder whose names end in ``suffix``.

    Args:
        path: The folder, or None for Python's standard library (without its tests).
        suffix: End of the names of the files to read.
        exclude: A folder whose files are not text, such as that of the run itself.

    Raises:
        CorpusError: If the folder is missing, holds fewer than two such files with text, or is
            part of ``exclude``.
    """
    root, names = find_texts(path, suffix, exclude)
    texts = {name: (root / name).read_bytes() for name in names}
    texts = {name: text for name, text in texts.items() if text}
    if len(texts) < 2:
        raise CorpusError(
            f"{root} holds {len(texts)} non-empty files named *{suffix}; two are needed, one to "
            "train on and one to hold out. Set data.path and data.suffix"
        )
    digest = hashlib.sha256()
    for name, text in texts.items():
        digest.update(os.fsencode(name) + f"\0{len(text)}\0".encode() + text)
    train, held_out = split_names(texts)
    return Corpus(
        train=_join(texts[name] for name in train),
        held_out=_join(texts[name] for name in held_out),
        num_files=(len(train), len(held_out)),
        digest=digest.hexdigest(),
        origin=origin_of(path),
        train_ends=np.cumsum([len(texts[name]) + 1 for name in train]),
        held_out_ends=np.cumsum([len(texts[name]) + 1 for name in held_out]),
    )


def find_texts(path: Path | None, suffix: str, exclude: Path | None) -> tuple[Path, list[str]]:
    """Return a folder and, sorted, the files below it whose names end in ``suffix``.

    Args:
        path: The folder, or None for Python's standard library (without its tests).
        suffix: End of the names.
        exclude: A folder whose files are left out.

    Raises:
        CorpusError: If the folder is missing or is part of ``exclude``.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else path
    if not root.is_dir():
        raise CorpusError(f"data.path {root} is not a folder")
    skipped = _SKIPPED_FOLDERS if path is None else set()
    inside = "" if exclude is None else os.path.join(os.path.realpath(exclude), "")
    if inside and os.path.join(os.path.realpath(root), "").startswith(inside):
        raise CorpusError(f"the text in {root} lies inside run_dir {exclude}; set another run_dir")
    names = sorted(
        file.relative_to(root).as_posix()
        for file in root.rglob("*")
        if file.name.endswith(suffix) and file.is_file()
        if not skipped & set(file.relative_to(root).parts)
        if not inside or not os.path.realpath(file).startswith(inside)
    )
    return root, names


def split_names(
    names: Iterable[str], percent: float = HELD_OUT_PERCENT
) -> tuple[list[str], list[str]]:
    """Return the names to train on and those to hold out, both sorted.

    Args:
        names: Of documents.
        percent: How many of 100 are held out, and at least one; 0 for none at all.
    """
    shuffled = sorted(names, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    num_held_out = max(1, int(len(shuffled) * percent / 100)) if percent else 0
    border = len(shuffled) - num_held_out
    train, held_out = shuffled[:border], shuffled[border:]
    return sorted(train), sorted(held_out)


def origin_of(path: Path | None) -> str:
    """Name a folder of text for people."""
    return "the sources of Python's standard library" if path is None else str(path)


def _join(texts: Iterable[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(text + b"\0" for text in texts), dtype=np.uint8)


def reference_losses(corpus: Corpus) -> dict[str, float]:
    """Return what tables of counts reach on the held-out text, in nats a byte.

    ``bigram`` predicts a byte from the one before it, ``trigram`` from the two before. Counts of
    the training text are smoothed with the next shorter table: one imagined sighting of a
    context is spread as that table would. At most ``COUNTED`` bytes are read of either part.
    """
    train, held_out, n = corpus.train[:COUNTED], corpus.held_out[:COUNTED].astype(np.int64), 256
    unigram = (_count_runs(train, 1) + 1) / (len(train) + n)
    pairs, triples = _count_runs(train, 2).reshape(n, n), _count_runs(train, 3)
    bigram = (pairs + unigram) / (pairs.sum(1, keepdims=True) + 1)
    contexts = triples.reshape(n * n, n).sum(1)

    first, second, third = held_out[:-2], held_out[1:-1], held_out[2:]
    context = first * n + second
    p2 = bigram[second, third]
    p3 = (triples[context * n + third] + p2) / (contexts[context] + 1)
    return {
        "bigram": float(-np.log(bigram[held_out[:-1], held_out[1:]]).mean()),
        "trigram": float(-np.log(p3).mean()),
    }


def _count_runs(text: NDArray[np.uint8], length: int) -> NDArray[np.int64]:
    """Count all runs of ``length`` bytes, block by block: wide copies of the text stay small."""
    counts, block = np.zeros(256**length, np.int64), 1 << 20
    for start in range(0, len(text) - length + 1, block):
        part = text[start : start + block + length - 1].astype(np.int64)
        runs = sum(
            part[i : len(part) - length + 1 + i] << 8 * (length - 1 - i) for i in range(length)
        )
        counts += np.bincount(runs, minlength=256**length)
    return counts
