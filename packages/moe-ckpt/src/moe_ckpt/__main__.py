"""The command line: look at checkpoints, check, compare, convert and delete them."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_ckpt import commands
from moe_ckpt.commands import BAD, USAGE
from moe_ckpt.errors import CheckpointError
from moe_ckpt.objects import as_place
from moe_ckpt.rounding import DTYPES

PLACE = "a checkpoint, or of a run: its newest one"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``moe-ckpt`` and return its exit code.

    0 is good. 1 is bad, different, refused or not found. 2 is wrong usage, which is a path that is
    no directory too. 130 is an interrupt.
    """
    options = _parser().parse_args(arguments)
    try:
        for path in options.directories(options):
            if not path.is_dir():
                what = "is not a directory" if path.exists() else "does not exist"
                return _failed(options, USAGE, "NotADirectoryError", f"{path} {what}")
        return options.command(options)
    except (CheckpointError, OSError, ValueError) as error:
        return _failed(options, BAD, type(error).__name__, str(error))
    except KeyboardInterrupt:
        return _failed(options, 130, "KeyboardInterrupt", "interrupted")


def _failed(options: argparse.Namespace, code: int, kind: str, message: str) -> int:
    if options.json:
        error = {"class": kind, "message": message}
        sys.stdout.write(json.dumps({"error": error}, indent=1) + "\n")
    sys.stderr.write(f"moe-ckpt: {message}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-ckpt",
        description="Look at checkpoints, check, compare, convert and delete them.",
        epilog="Directories may be in an object store: s3://BUCKET/RUN, gs://BUCKET/RUN, or the "
        "JSON of a key-value store of tensorstore. "
        "Exit codes: 0 good, 1 bad, different or refused, 2 wrong usage.",
    )
    add = parser.add_subparsers(required=True, metavar="COMMAND").add_parser

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str, *paths: str):
        sub = add(name, help=text, description=text)
        for path, what in zip(paths[::2], paths[1::2], strict=True):
            local = path in ("OUT", "SOURCE")
            sub.add_argument(
                path.lower(), metavar=path, type=Path if local else as_place, help=what
            )
        sub.add_argument("--json", action="store_true", help="print one JSON value")
        # What is not there yet is made: the second path of export and of import.
        there = paths[::2] if name == "diff" else paths[:1]
        sub.set_defaults(
            command=run, directories=lambda o: [getattr(o, path.lower()) for path in there]
        )
        return sub

    sub = command(
        "inspect", commands.inspect, "show what a checkpoint holds", "PATH", f"directory of {PLACE}"
    )
    sub.add_argument("--tensors", metavar="PATTERN", default="*", help="only these, as name/kind")
    command(
        "ls", commands.ls, "list the checkpoints of a run, newest first", "ROOT",
        "directory of the run",
    )  # fmt: skip
    sub = command(
        "verify", commands.verify_all, "read every byte and name each bad chunk", "PATH",
        f"directory of {PLACE}",
    )  # fmt: skip
    sub.add_argument("--fast", action="store_true", help="read lengths and checksums only")
    sub = command(
        "diff", commands.diff, "say what differs between two checkpoints", "A",
        f"directory of {PLACE}", "B", "of another",
    )  # fmt: skip
    sub.add_argument("--values", action="store_true", help="read what differs and say by how much")
    _add_export(command)
    _add_import(command)
    sub = command(
        "gc", commands.gc, "delete unfinished saves, and what else is asked for", "ROOT",
        "directory of the run",
    )  # fmt: skip
    sub.add_argument("--keep", type=int, metavar="N", help="delete all but the newest N")
    sub.add_argument("--damaged", action="store_true", help="delete damaged checkpoints too")
    sub.add_argument("--dry-run", action="store_true", help="delete nothing, only say what")
    return parser


def _add_export(command: Callable[..., argparse.ArgumentParser]) -> None:
    sub = command(
        "export", commands.export, "make a Hugging Face folder of the master weights", "PATH",
        f"directory of {PLACE}", "OUT", "folder to make; with --format safetensors a file",
    )  # fmt: skip
    sub.add_argument("--format", choices=["hf", "safetensors"], default="hf",
                     help="safetensors: one file, under the names of the checkpoint")  # fmt: skip
    sub.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    sub.add_argument("--config", metavar="FILE", help="config.json, unless the state has it")
    sub.add_argument("--file-gib", type=float, default=5.0, metavar="GIB", help="default: 5")
    sub.add_argument("--skip", action="append", default=[], metavar="PATTERN",
                     help="leave out tensors of this name here")  # fmt: skip


def _add_import(command: Callable[..., argparse.ArgumentParser]) -> None:
    sub = command(
        "import", commands.import_model, "make a checkpoint of a Hugging Face folder", "SOURCE",
        "folder with config.json and safetensors files", "ROOT", "directory of the run to begin",
    )  # fmt: skip
    sub.add_argument("--step", type=int, default=0, help="default: 0")
    sub.add_argument("--config", metavar="FILE", help="instead of the config.json there")
    sub.add_argument("--moments", action="store_true", help="save moments of zero beside them")
    sub.add_argument("--overwrite", action="store_true", help="replace a checkpoint of this step")
    sub.add_argument("--skip", action="append", default=[], metavar="PATTERN",
                     help="leave out tensors of this name there")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
