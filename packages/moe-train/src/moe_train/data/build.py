"""Make token shards from a folder of text, in a way that can be interrupted at any moment.

A pair of files is written under other names, made durable, and renamed; then the journal says so.
A builder that finds a journal of the same plan goes on after the last pair in it. The index is
written last, so a folder either has all its shards or is not readable at all.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_train.corpus import HELD_OUT_PERCENT, CorpusError, find_texts, origin_of, split_names
from moe_train.data.shards import (
    DTYPES,
    END,
    FORMAT,
    INDEX,
    JOURNAL,
    PARTS,
    TOKENIZER,
    ShardFile,
    Shards,
    index_text,
)
from moe_train.data.tokenizer import FileTokenizer, Tokenizer

_LOCK = "build.lock"
SHARD_TOKENS = 1 << 30
_AT_ONCE = 8 << 20
"""Bytes of text that are handed to a tokenizer together, so that it can use all cores."""


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What is built from what.

    Attributes:
        root: The folder of text.
        documents: For each part, the names of its files, in order, and their sizes in bytes.
        tokenizer: Makes ids of text.
        origin: Where the text came from, for people.
        shard_tokens: A file is ended by the document with which it reaches this number.
        replace: Whether bytes that are not UTF-8 are replaced rather than refused.
        identity: Changes whenever the shards would. ``replace`` is not in it: what it changes was
            refused without it.
    """

    root: Path
    documents: dict[str, list[tuple[str, int]]]
    tokenizer: Tokenizer
    origin: str
    shard_tokens: int
    replace: bool
    identity: str

    @property
    def num_bytes(self) -> int:
        return sum(size for documents in self.documents.values() for _, size in documents)


def plan_build(
    path: Path | None,
    suffix: str,
    tokenizer: Tokenizer,
    *,
    out: Path,
    held_out: float = HELD_OUT_PERCENT,
    shard_tokens: int = SHARD_TOKENS,
    replace: bool = False,
) -> BuildPlan:
    """Look at a folder of text and decide which file goes where.

    Args:
        path: The folder, or None for Python's standard library.
        suffix: End of the names of the files to read. A file is a document.
        tokenizer: Makes ids of text.
        out: Where the shards will be; nothing in it is text.
        held_out: How many documents of 100 are held out, and at least one; 0 for none at all.
        shard_tokens: A file is ended by the document with which it reaches this number.
        replace: Whether bytes that are not UTF-8 are replaced rather than refused.

    Raises:
        CorpusError: If there is too little text, or a number is out of its range.
    """
    if not 0 <= held_out < 100:
        raise CorpusError(f"held_out is a percentage from 0 to below 100, got {held_out}")
    if shard_tokens < 1:
        raise CorpusError(f"shard_tokens must be at least 1, got {shard_tokens}")
    root, names = find_texts(path, suffix, out)
    found = {name: (root / name).stat() for name in names}
    sizes = {name: stat.st_size for name, stat in found.items() if stat.st_size}
    if len(sizes) < 1 + bool(held_out):
        raise CorpusError(
            f"{root} holds {len(sizes)} non-empty files named *{suffix}; "
            + ("two are needed, one to train on and one to hold out" if held_out else "one is")
        )
    parts = dict(zip(PARTS, split_names(sizes, held_out), strict=True))
    times = {name: found[name].st_mtime_ns for name in sizes}
    identity = [tokenizer.digest, tokenizer.eos, shard_tokens, parts, sizes, times]
    return BuildPlan(
        root=root,
        documents={part: [(n, sizes[n]) for n in names] for part, names in parts.items()},
        tokenizer=tokenizer,
        origin=origin_of(path),
        shard_tokens=shard_tokens,
        replace=replace,
        identity=sha256(json.dumps(identity).encode()).hexdigest(),
    )


def build(
    plan: BuildPlan, out: Path, progress: Callable[[int], None] = lambda size: None
) -> Shards:
    """Make the shards of a plan, or go on making them.

    Args:
        plan: What to build.
        out: A folder that is empty, missing, or half built by the same plan.
        progress: Called with the number of bytes of text, as they are done.

    Raises:
        CorpusError: If the folder holds anything else, or the text cannot be tokenised.
    """
    _refuse_strangers(out)
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        journal = _Journal.open(out, plan)
        if isinstance(plan.tokenizer, FileTokenizer):
            _replace(out / TOKENIZER, plan.tokenizer.content)
        for part in PARTS:
            _build_part(plan, part, out, journal, progress)
        for part in PARTS:
            if plan.documents[part] and not journal.files[part]:
                raise CorpusError(f"no document of the {part} part of {plan.root} has any tokens")
        text = index_text(
            dtype=_dtype(plan.tokenizer), tokenizer=plan.tokenizer, origin=plan.origin,
            parts=journal.files,
        )  # fmt: skip
        _replace(out / INDEX, text.encode())
        (out / JOURNAL).unlink()
    (out / _LOCK).unlink(missing_ok=True)
    return Shards(out)


def _build_part(
    plan: BuildPlan, part: str, out: Path, journal: "_Journal", progress: Callable[[int], None]
) -> None:
    """Write the files of a part that the journal does not have yet."""
    files, begin = journal.files[part], journal.begun[part]
    progress(sum(size for _, size in plan.documents[part][:begin]))
    writer = _Writer(out / f"{part}-{len(files):05}", plan.tokenizer)
    try:
        for number, (size, ids) in enumerate(_encoded(plan, part, begin), begin + 1):
            writer.add(ids, size)
            progress(size)
            if writer.tokens >= plan.shard_tokens:
                journal.add(part, writer.finish(), number)
                writer = _Writer(out / f"{part}-{len(files):05}", plan.tokenizer)
        if writer.ends:
            journal.add(part, writer.finish(), len(plan.documents[part]))
    finally:
        writer.discard()


def _encoded(plan: BuildPlan, part: str, begin: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the size in bytes and the ids of each document from number ``begin`` on."""
    group: list[str] = []
    waiting = 0
    documents = plan.documents[part]
    for number, (name, size) in enumerate(documents[begin:], begin + 1):
        group.append(name)
        waiting += size
        if waiting >= _AT_ONCE or number == len(documents):
            texts = [_read(plan, name) for name in group]
            for text, ids in zip(texts, plan.tokenizer.encode(texts), strict=True):
                yield len(text), ids
            group, waiting = [], 0


def _read(plan: BuildPlan, name: str) -> bytes:
    text = (plan.root / name).read_bytes()
    if not isinstance(plan.tokenizer, FileTokenizer):
        return text  # bytes are tokens whatever they mean
    if plan.replace:
        return text.decode(errors="replace").encode()
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{plan.root / name} is not UTF-8 at byte {error.start}; --replace-invalid builds "
            "all the same, with U+FFFD there"
        ) from error
    return text


def _dtype(tokenizer: Tokenizer) -> str:
    """Name the narrowest dtype that holds every id."""
    fits = [n for n, dtype in DTYPES.items() if tokenizer.vocab_size - 1 <= np.iinfo(dtype).max]
    if not fits:
        raise CorpusError(f"a vocabulary of {tokenizer.vocab_size} does not fit into 32 bits")
    return fits[0]


class _Writer:
    """Writes one pair of files, which has its names only once it is whole."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        self.path, self.tokenizer = path, tokenizer
        self.dtype = DTYPES[_dtype(tokenizer)]
        self.tokens = self.num_bytes = 0
        self.ends: list[int] = []
        self.digest = sha256()
        self.file = path.with_name(f"{path.name}.bin.partial").open("wb")

    def add(self, ids: NDArray[Any], num_bytes: int) -> None:
        """Append a document."""
        eos, vocab_size = self.tokenizer.eos, self.tokenizer.vocab_size
        if len(ids) == 0:
            return
        if ids.max() >= vocab_size:
            raise CorpusError(f"the tokenizer made the id {ids.max()} of {vocab_size}")
        if eos is not None:
            ids = np.append(ids, np.asarray(eos, ids.dtype))
        content = ids.astype(self.dtype).tobytes()
        self.file.write(content)
        self.digest.update(content)
        self.tokens += len(ids)
        self.ends.append(self.tokens)
        # A byte that ends a document counts: with bytes, a token is a byte throughout.
        self.num_bytes += num_bytes + (eos is not None and self.tokenizer.digest == "bytes")

    def finish(self) -> ShardFile:
        """Make both files durable and give them their names."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        Path(self.file.name).replace(self.path.with_name(f"{self.path.name}.bin"))
        ends = np.asarray(self.ends, END).tobytes()
        self.digest.update(ends)
        _replace(self.path.with_name(f"{self.path.name}.ends"), ends)
        return ShardFile(
            name=self.path.name, tokens=self.tokens, documents=len(self.ends),
            num_bytes=self.num_bytes, sha256=self.digest.hexdigest(),
        )  # fmt: skip

    def discard(self) -> None:
        """Leave nothing of what is not finished."""
        self.file.close()
        Path(self.file.name).unlink(missing_ok=True)


@dataclass(slots=True)
class _Journal:
    """What is done of a build.

    Attributes:
        path: The file that says so.
        identity: Of the plan.
        files: For each part, the pairs of files that are whole.
        begun: For each part, the number of the first document that is in none of them.
    """

    path: Path
    identity: str
    files: dict[str, list[ShardFile]] = field(default_factory=lambda: {p: [] for p in PARTS})
    begun: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    @classmethod
    def open(cls, out: Path, plan: BuildPlan) -> "_Journal":
        journal = cls(out / JOURNAL, plan.identity)
        if journal.path.exists():
            try:
                found = json.loads(journal.path.read_text())
                same = found["identity"] == plan.identity
                for part in PARTS:
                    journal.files[part] = [ShardFile.read(entry) for entry in found["files"][part]]
                    journal.begun[part] = int(found["begun"][part])
            except (KeyError, TypeError, ValueError) as error:
                raise CorpusError(f"{journal.path} is damaged; remove {out}: {error}") from error
            if not same:
                raise CorpusError(
                    f"{out} is half built from other text, another tokenizer or with other "
                    "options. Give the same again, or remove it"
                )
        journal.save()
        return journal

    def add(self, part: str, file: ShardFile, begun: int) -> None:
        """Record that a pair of files is whole."""
        self.files[part].append(file)
        self.begun[part] = begun
        self.save()

    def save(self) -> None:
        files = {part: [asdict(file) for file in files] for part, files in self.files.items()}
        content = {"format": FORMAT, "identity": self.identity, "begun": self.begun}
        _replace(self.path, json.dumps(content | {"files": files}).encode())


def _refuse_strangers(out: Path) -> None:
    """Refuse a folder that holds anything but a build that was interrupted."""
    if out.exists() and not out.is_dir():
        raise CorpusError(f"{out} is not a folder")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    if INDEX in names:
        raise CorpusError(f"{out} holds finished token shards already; look at them with inspect")
    if names - {_LOCK, f"{JOURNAL}.partial"} and JOURNAL not in names:
        raise CorpusError(f"{out} is not empty, and what is in it is no build of token shards")


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    with (out / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CorpusError(f"another process is building in {out}") from error
        yield


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole and durably, or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
