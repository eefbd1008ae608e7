"""``moe-train data``: make token shards, and look at what is in them."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from moe_train.commands.options import read_options, say
from moe_train.corpus import HELD_OUT_PERCENT, CorpusError
from moe_train.data.build import SHARD_TOKENS, build, plan_build
from moe_train.data.sequences import evenly
from moe_train.data.shards import PARTS, Shards
from moe_train.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from moe_train.data.tokens import Tokens
from moe_train.load_config import ConfigError
from moe_train.load_config.names import nearest

_SHOWN = 64  # tokens of a sample


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions:
    """Token shards from a folder of text, in which a file is a document.

    Attributes:
        out: A new folder for the shards, or one in which the same command was interrupted.
        path: A folder of text files; without it, the sources of Python's standard library.
        suffix: Which files of the folder are read, by the end of their name.
        tokenizer: A tokenizer.json of the library tokenizers; without it, bytes are tokens.
        eos: Token that ends each document, such as ``</s>``. Without it, a zero byte ends a
            document of bytes and nothing any other; ``none`` leaves the zero byte away too.
        held_out: Documents of 100 that are held out from training, and at least one; 0 for none.
        shard_tokens: Tokens after which another file begins.
        replace_invalid: Put U+FFFD where text is not UTF-8, which is refused otherwise.
    """

    out: Path
    path: Path | None = None
    suffix: str = ".py"
    tokenizer: Path | None = None
    eos: str = ""
    held_out: float = HELD_OUT_PERCENT
    shard_tokens: int = SHARD_TOKENS
    replace_invalid: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectOptions:
    """What is in a folder of token shards.

    Attributes:
        folder: The folder.
        samples: Documents of each part that are decoded.
        verify: Read every byte, to see that it is as it was written.
    """

    folder: Path
    samples: int = 3
    verify: bool = True


FLAGS = {"build": BuildOptions, "inspect": InspectOptions}
USAGE = """usage: moe-train data COMMAND [OPTIONS]

commands:
  build OUT        make token shards from a folder of text
  inspect FOLDER   what is in a folder of token shards, and whether it is as it was written

examples:
  moe-train data build shards/code --path src --suffix .py
  moe-train data build shards/prose --path books --tokenizer tokenizer.json --eos '</s>'
  moe-train data inspect shards/prose
  moe-train run --data.path shards/prose --model.vocab-size 32000"""


def main(argv: list[str]) -> int:
    """Do one of the two."""
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help"):
        say(USAGE)
        return 0
    work = {"build": _build, "inspect": _inspect}
    if name not in work:
        raise ConfigError(f"unknown command 'data {name}'{nearest(name, work)}")
    return work[name](rest)


def _build(argv: list[str]) -> int:
    options = read_options(
        BuildOptions, argv, prog="moe-train data build", places=("out",),
        about="Make token shards from a folder of text; a file is a document. Interrupted, the "
        "same command goes on.",
        examples=(
            "moe-train data build shards/code --path src --suffix .py",
            "moe-train data build shards/prose --path books --suffix .txt "
            "--tokenizer tokenizer.json --eos '</s>'",
        ),
    ).config  # fmt: skip
    plan = plan_build(
        options.path,
        options.suffix,
        _tokenizer(options),
        out=options.out,
        held_out=options.held_out,
        shard_tokens=options.shard_tokens,
        replace=options.replace_invalid,
    )
    with _bar("building", plan.num_bytes) as progress:
        shards = build(plan, options.out, progress)
    for line in _summary(shards):
        _say(line)
    return 0


def _tokenizer(options: BuildOptions) -> Tokenizer:
    eos = options.eos
    if options.tokenizer is not None:
        return FileTokenizer(options.tokenizer, None if eos in ("", "none") else eos)
    if eos not in ("", "none"):
        raise ConfigError(f"eos {eos!r}: bytes have no such token; leave it away, or say none")
    return ByteTokenizer(eos=not eos)


def _inspect(argv: list[str]) -> int:
    options = read_options(
        InspectOptions, argv, prog="moe-train data inspect", places=("folder",),
        about="Say what is in a folder of token shards, decode some of it, and read every byte "
        "to see that it is as it was written.",
        examples=(
            "moe-train data inspect shards/prose",
            "moe-train data inspect shards/prose --samples 10 --no-verify",
        ),
    ).config  # fmt: skip
    shards = Shards(options.folder)
    for line in _summary(shards):
        _say(line)
    tokenizer = shards.tokenizer()
    for part in PARTS:
        tokens = shards.tokens(part)
        for document in evenly(options.samples, tokens.num_documents).tolist():
            _say(_sample(tokens, tokenizer, part, document))
    return _verify(shards) if options.verify else 0


def _verify(shards: Shards) -> int:
    size = sum(
        file.tokens * shards.dtype.itemsize + file.documents * 8
        for files in shards.files.values()
        for file in files
    )
    try:
        with _bar("reading", size) as progress:
            shards.verify(progress)
    except CorpusError as error:
        print(f"moe-train: {error}", file=sys.stderr)  # noqa: T201
        return 1
    _say(f"every one of {size:,} bytes is as it was written")
    return 0


def _summary(shards: Shards) -> Iterator[str]:
    yield f"{shards.root}: token shards of {shards.origin}"
    tokenizer = shards.tokenizer()
    eos = "nothing ends a document" if tokenizer.eos is None else f"{tokenizer.eos} ends a document"
    made_by = tokenizer.digest if tokenizer.digest == "bytes" else f"{tokenizer.digest[:12]}…"
    stored = f"vocabulary {shards.vocab_size:,}, stored as {shards.dtype.name}"
    yield f"tokenizer {made_by}, {stored}; {eos}"
    for part in PARTS:
        tokens = shards.tokens(part)
        if not len(tokens):
            yield f"{part}: nothing"
            continue
        sizes = [np.diff(ends, prepend=0) for ends in tokens.ends]
        least, most = min(int(n.min()) for n in sizes), max(int(n.max()) for n in sizes)
        mean = len(tokens) / tokens.num_documents
        yield (
            f"{part}: {len(tokens):,} tokens of {tokens.num_bytes:,} bytes "
            f"({tokens.bytes_per_token:.3f} bytes a token) in {tokens.num_documents:,} documents, "
            f"{len(tokens.pieces)} files; tokens a document: {least:,} to "
            f"{most:,}, {mean:,.0f} on average"
        )
    yield f"digest {shards.digest}"


def _sample(tokens: Tokens, tokenizer: Tokenizer, part: str, document: int) -> str:
    """Return the first tokens of a document as one line, without what would move the cursor."""
    start, stop = tokens.document(document)
    text = tokenizer.decode(tokens.read(start, min(stop, start + _SHOWN)).tolist())
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return f"{part} document {document}, {stop - start:,} tokens: {shown}"


@contextmanager
def _bar(what: str, size: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=size)
        yield lambda done: progress.update(task, advance=done)


def _say(line: str) -> None:
    # A name of a file may hold bytes that are no text.
    say(os.fsencode(line).decode(errors="replace"))
