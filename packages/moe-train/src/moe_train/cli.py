"""The command line. Every error is one line; `commands/table.py` says which commands there are.

Nothing here imports torch, which takes seconds: help, versions and refused words are answered at
once, and a command imports what it needs.
"""

import importlib
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from moe_train.commands.table import find, usage
from moe_train.errors import RunError
from moe_train.load_config import ConfigError

_REFUSED, _FAILED = 2, 1
_VERSIONED = ("moe-kernels", "moe-dispatch", "moe-parallel", "moe-ckpt", "torch", "triton")


def command(argv: list[str]) -> int:
    """Run a command and return its exit code."""
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(usage())  # noqa: T201
        return 0
    if name in ("-V", "--version"):
        print(_version())  # noqa: T201
        return 0
    try:
        return find(name).load().main(rest)
    except (ConfigError, RunError) as error:
        return _complain(error, code=_REFUSED, alike=True)
    except BrokenPipeError:  # who read what we print has seen enough: `moe-train config | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, for what the interpreter flushes at its end
        return _FAILED
    except Exception as error:
        kind = importlib.import_module("moe_train.failures").kind_of(error)
        if kind.said is None:
            raise
        return _complain(kind.said, code=_REFUSED if kind.refused else _FAILED, alike=kind.alike)


def _version() -> str:
    others = ", ".join(f"{name} {_version_of(name)}" for name in _VERSIONED)
    return f"moe-train {_version_of('moe-train')} ({others}, Python {platform.python_version()})"


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _complain(error: BaseException, *, code: int, alike: bool) -> int:
    """Print an error as one line. What all ranks meet alike is told by the first of a machine."""
    rank, local_rank = (os.environ.get(name, "0") for name in ("RANK", "LOCAL_RANK"))
    if local_rank == "0" or not alike:
        where = "" if rank == "0" or code == _REFUSED else f"rank {rank}: "
        print(f"moe-train: {where}{' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
    return code
