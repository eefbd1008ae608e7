"""``moe-train data build`` and ``moe-train data inspect``."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
from rich.console import Console
from rich.progress import Progress

from moe_train.corpus import HELD_OUT_PERCENT, CorpusError
from moe_train.data.build import build, plan_build
from moe_train.data.shards import PARTS, Shards
from moe_train.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from moe_train.data.tokens import Tokens
from moe_train.load_config import ConfigError

_SHOWN = 64  # tokens of a sample


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; --help says more")


def main(argv: list[str]) -> int:
    """Run ``moe-train data`` and return its exit code."""
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="moe-train data", description="Make token shards, and look at what is in them."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    one = commands.add_parser(
        "build",
        help="make token shards from a folder of text",
        description="Make token shards from a folder of text; a file is a document. Interrupted, "
        "the same command goes on. `moe-train run --data.path OUT` trains on them.",
    )
    one.add_argument("out", type=Path, metavar="OUT", help="a new folder for the shards")
    one.add_argument(
        "--path", type=Path, help="folder of text; without it, Python's standard library"
    )
    one.add_argument("--suffix", default=".py", help="files to read, by their end (%(default)s)")
    one.add_argument(
        "--tokenizer", type=Path, metavar="FILE",
        help="a tokenizer.json of the library tokenizers; without it, bytes are tokens",
    )  # fmt: skip
    one.add_argument(
        "--eos", metavar="TOKEN",
        help="token that ends each document, such as '</s>'; without it, nothing does but after "
        "bytes a zero byte; 'none' leaves that away too",
    )  # fmt: skip
    one.add_argument(
        "--held-out", type=float, default=HELD_OUT_PERCENT, metavar="PERCENT",
        help="documents that are held out from training (%(default)s)",
    )  # fmt: skip
    one.add_argument(
        "--shard-tokens", type=int, default=1 << 30, metavar="N",
        help="tokens after which another file begins (%(default)s)",
    )  # fmt: skip
    one.add_argument(
        "--replace-invalid", action="store_true",
        help="put U+FFFD where text is not UTF-8, which is refused otherwise",
    )  # fmt: skip
    one.set_defaults(run=_build)

    one = commands.add_parser(
        "inspect",
        help="say what is in a folder of token shards",
        description="Say what is in a folder of token shards, decode some of it, and read every "
        "byte to see that it is as it was written.",
    )
    one.add_argument("folder", type=Path, metavar="FOLDER")
    one.add_argument("--samples", type=int, default=3, help="documents to decode (%(default)s)")
    one.add_argument("--no-verify", action="store_true", help="do not read every byte")
    one.set_defaults(run=_inspect)
    return parser


def _build(arguments: argparse.Namespace) -> int:
    eos = None if arguments.eos == "none" else arguments.eos
    if arguments.tokenizer is not None:
        tokenizer: Tokenizer = FileTokenizer(arguments.tokenizer, eos)
    elif eos is not None:
        raise ConfigError(f"--eos {eos}: bytes have no such token; leave it away, or say 'none'")
    else:
        tokenizer = ByteTokenizer(eos=arguments.eos != "none")
    plan = plan_build(
        arguments.path,
        arguments.suffix,
        tokenizer,
        out=arguments.out,
        held_out=arguments.held_out,
        shard_tokens=arguments.shard_tokens,
        replace=arguments.replace_invalid,
    )
    with _bar("building", plan.num_bytes) as progress:
        shards = build(plan, arguments.out, progress)
    for line in _summary(shards):
        _say(line)
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    shards = Shards(arguments.folder)
    for line in _summary(shards):
        _say(line)
    tokenizer = shards.tokenizer()
    for part in PARTS:
        tokens = shards.tokens(part)
        for number in range(min(arguments.samples, tokens.num_documents)):
            document = number * tokens.num_documents // arguments.samples
            _say(_sample(tokens, tokenizer, part, document))
    if arguments.no_verify:
        return 0
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
        sizes = np.concatenate([np.diff(ends, prepend=0) for ends in tokens.ends])
        yield (
            f"{part}: {len(tokens):,} tokens of {tokens.num_bytes:,} bytes "
            f"({tokens.bytes_per_token:.3f} bytes a token) in {tokens.num_documents:,} documents, "
            f"{len(tokens.pieces)} files; tokens a document: {sizes.min():,} to {sizes.max():,}, "
            f"half of them at most {int(np.median(sizes)):,}"
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
    print(os.fsencode(line).decode(errors="replace"))  # noqa: T201
