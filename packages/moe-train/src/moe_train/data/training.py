"""All data of a run: what is trained on, what is held out, and how both are known again."""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from moe_train.config.data import DataConfig
from moe_train.corpus import Corpus, CorpusError, load_corpus, origin_of
from moe_train.data.build import build, plan_build
from moe_train.data.mixture import Mixture
from moe_train.data.packing import PackedSequences
from moe_train.data.sequences import Sequences, SequenceSource
from moe_train.data.shards import INDEX, Shards, is_shards
from moe_train.data.tokenizer import NUM_BYTES, ByteTokenizer, FileTokenizer, Tokenizer
from moe_train.data.tokens import Tokens


@dataclass(frozen=True, slots=True)
class TrainingData:
    """All data of a run.

    Attributes:
        train: Sequences to train on.
        held_out: Sequences to validate on, by the name of their source.
        weights: Of the sources that have any held out; they sum to one.
        tokenizer: Made all ids.
        bytes_per_token: Of the held-out text. Nats a token divided by it are nats a byte.
        digest: Changes whenever the order of the sequences or their tokens do, but for what the
            settings say.
        origin: Where the text came from, for people.
        about: Lines about each source, for people.
        text: The text as bytes, if bytes are its tokens and it has one source.
    """

    train: SequenceSource
    held_out: Mapping[str, SequenceSource]
    weights: Mapping[str, float]
    tokenizer: Tokenizer
    bytes_per_token: float
    digest: str
    origin: str
    about: tuple[str, ...]
    text: Corpus | None

    @property
    def validation(self) -> SequenceSource:
        """All held-out sequences as one source."""
        if len(self.held_out) == 1:
            return next(iter(self.held_out.values()))
        return Mixture(self.held_out, {n: Fraction(w) for n, w in self.weights.items()})

    def mean(self, losses: Mapping[str, float]) -> float:
        """Return the mean of the losses of all held-out sets, by the weights of their sources."""
        return sum(self.weights[name] * loss for name, loss in losses.items())

    def describe(self, loss: float) -> str:
        """Write a loss with its unit, and for comparison between tokenizers a byte's share."""
        if self.tokenizer.digest == "bytes":
            return f"{loss:.4f} nats a byte"
        return f"{loss:.4f} nats a token, {loss / self.bytes_per_token:.4f} a byte"


@dataclass(frozen=True, slots=True)
class _Opened:
    """One folder: its tokens and how they are known again."""

    train: Tokens
    held_out: Tokens
    tokenizer: Tokenizer
    digest: str
    about: str
    text: Corpus | None


def open_data(config: DataConfig, vocab_size: int, run_dir: Path) -> TrainingData:
    """Open the data of a run.

    Args:
        config: Where it is and how it is cut.
        vocab_size: V of the model.
        run_dir: Where indices and tokenised text are kept. Nothing in it is text.

    Raises:
        CorpusError: If there is no text, the sources have different tokenizers, or their
            vocabulary does not fit the model's.
    """
    mixture = config.mixture()
    paths: dict[str, Path | None] = {s.name: s.path for s in mixture} or {"text": config.path}
    _check_vocabulary(config, paths, vocab_size)
    opened = {name: _open(path, config, run_dir) for name, path in paths.items()}
    first, *others = opened
    for name in others:
        one, other = opened[first].tokenizer, opened[name].tokenizer
        if one.digest != other.digest:
            raise CorpusError(
                f"data.sources: {first} and {name} are of different tokenizers, SHA-256 "
                f"{one.digest[:12]} and {other.digest[:12]}"
            )
    train = {n: _cut(o.train, config, run_dir, f"{o.digest} train") for n, o in opened.items()}
    held_out = {
        name: _cut(one.held_out, config, run_dir, f"{one.digest} held_out")
        for name, one in opened.items()
        if len(one.held_out)
    }
    if not held_out:
        raise CorpusError(
            "nothing is held out to validate on: build shards with --held-out above 0"
        )
    weights = {s.name: s.weight for s in mixture} or {first: Fraction(1)}
    total = sum(weights[name] for name in held_out)
    shares = {name: float(weights[name] / total) for name in held_out}
    digest = opened[first].digest
    if mixture:
        parts = [f"{name} {weights[name]} {opened[name].digest}" for name in opened]
        digest = sha256("\n".join(parts).encode()).hexdigest()
    return TrainingData(
        train=Mixture(train, weights) if mixture else train[first],
        held_out=held_out,
        weights=shares,
        tokenizer=opened[first].tokenizer,
        bytes_per_token=sum(
            share * opened[name].held_out.bytes_per_token for name, share in shares.items()
        ),
        digest=digest,
        origin=", ".join(config.sources) or origin_of(config.path),
        about=tuple(_about(n, o, train[n], bool(mixture)) for n, o in opened.items()),
        text=None if mixture else opened[first].text,
    )


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """Return the tokenizer of some data, without reading them.

    Raises:
        CorpusError: If it is missing.
    """
    paths = [source.path for source in config.mixture()] or [config.path]
    if paths[0] is not None and is_shards(paths[0]):
        return Shards(paths[0]).tokenizer()
    if config.tokenizer is not None:
        return FileTokenizer(config.tokenizer, config.eos or None)
    return ByteTokenizer()


def _check_vocabulary(
    config: DataConfig, paths: Mapping[str, Path | None], vocab_size: int
) -> None:
    """Refuse a vocabulary that the model has not, before any text is read."""
    for path in paths.values():
        if path is not None and is_shards(path):
            needed, what = Shards(path).vocab_size, f"the token shards in {path}"
        elif config.tokenizer is not None:
            needed, what = FileTokenizer(config.tokenizer).vocab_size, str(config.tokenizer)
        else:
            needed, what = NUM_BYTES, "text read as bytes"
        if needed > vocab_size:
            raise CorpusError(
                f"model.vocab_size must be at least {needed}, the vocabulary of {what}, got "
                f"{vocab_size}"
            )


def _open(path: Path | None, config: DataConfig, run_dir: Path) -> _Opened:
    if path is not None and is_shards(path):
        if config.tokenizer is not None:
            raise CorpusError(
                f"data.tokenizer is for text, and {path} holds token shards, which bring their "
                "own; leave it away"
            )
        return _of_shards(Shards(path), str(path))
    if config.tokenizer is not None:
        return _tokenised(path, config, run_dir)
    corpus = load_corpus(path, config.suffix, exclude=run_dir)
    files = corpus.num_files
    return _Opened(
        train=_of_bytes(corpus.train, corpus.train_ends, corpus.origin),
        held_out=_of_bytes(corpus.held_out, corpus.held_out_ends, corpus.origin),
        tokenizer=ByteTokenizer(),
        digest=corpus.digest,
        about=f"{files[0]} files, {len(corpus.train):,} bytes of {corpus.origin}; "
        f"{files[1]} files, {len(corpus.held_out):,} bytes held out",
        text=corpus,
    )


def _of_bytes(text: NDArray[np.uint8], ends: NDArray[np.int64], origin: str) -> Tokens:
    return Tokens((text,), (ends,), NUM_BYTES, len(text), origin)


def _of_shards(shards: Shards, origin: str) -> _Opened:
    train, held_out = shards.tokens("train"), shards.tokens("held_out")
    tokenizer, text = shards.tokenizer(), None
    if tokenizer.digest == "bytes" and len(train) and len(held_out):
        sizes = train.num_documents, held_out.num_documents
        text = Corpus(train.pieces[0], held_out.pieces[0], sizes, shards.digest, origin)
    return _Opened(
        train=train,
        held_out=held_out,
        tokenizer=tokenizer,
        digest=shards.digest,
        about=f"{train.num_documents:,} documents, {len(train):,} tokens of {origin}; "
        f"{held_out.num_documents:,} documents, {len(held_out):,} tokens held out",
        text=text,
    )


def _tokenised(path: Path | None, config: DataConfig, run_dir: Path) -> _Opened:
    """Tokenise a folder of text once. The ranks of a machine wait for the first of them."""
    tokenizer = FileTokenizer(cast(Path, config.tokenizer), config.eos or None)
    plan = plan_build(path, config.suffix, tokenizer, out=run_dir)
    out = run_dir / "tokens" / plan.identity[:16]
    with _waiting(run_dir / "tokens"):
        shards = Shards(out) if (out / INDEX).exists() else build(plan, out)
    return _of_shards(shards, origin_of(path))


@contextmanager
def _waiting(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go when the holder ends, however it does
        yield


def _cut(tokens: Tokens, config: DataConfig, run_dir: Path, identity: str) -> SequenceSource:
    if config.packing == "stream":
        return Sequences(tokens, config.sequence_length)
    return PackedSequences(tokens, config.sequence_length, run_dir / "packing", identity)


def _about(name: str, one: _Opened, train: SequenceSource, mixed: bool) -> str:
    packed = f"; rows {train.fill:.1%} full" if isinstance(train, PackedSequences) else ""
    return f"{name}: {one.about}{packed}" if mixed else one.about + packed
