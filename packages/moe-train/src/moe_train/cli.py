"""Command line: ``moe-train run``, ``moe-train report``. Errors are one line each."""

import os
import sys
from pathlib import Path

from moe_ckpt import CheckpointError
from moe_parallel import MeshError, MismatchError, leave
from torch.distributed import DistError

from moe_train.config import RunConfig
from moe_train.corpus import CorpusError
from moe_train.errors import RunError
from moe_train.launch import launch
from moe_train.load_config import ConfigError, load_config
from moe_train.prepare import prepare
from moe_train.ranks import rank_info
from moe_train.report import write_report
from moe_train.run import run

USAGE = """usage: moe-train COMMAND [OPTIONS]

commands:
  run              train, or go on training; `moe-train run --help` lists every option
  report FOLDER    write FOLDER/report.html again from what the run has recorded

exit codes: 0 done, or stopped and saved; 1 failed; 2 refused before any work; 130 interrupted"""

_ABOUT = "Train a Mixture-of-Experts language model, or go on from where a run is."
_REFUSED = (ConfigError, CorpusError, MeshError, RunError)
_FAILED = (CheckpointError, MismatchError, OSError)
_ALIKE = (*_REFUSED, CheckpointError, MismatchError)


def command(argv: list[str]) -> int:
    """Run a command and return its exit code."""
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help"):
        print(USAGE)  # noqa: T201
        return 0
    try:
        if name == "run":
            return _run(rest)
        if name == "report":
            return _report(rest)
        raise ConfigError(f"unknown command {name!r}; there are run and report")
    except (*_REFUSED, *_FAILED) as error:
        _complain(error)
        return 2 if isinstance(error, _REFUSED) else 1
    except RuntimeError as error:
        # A rank that fails cuts its connections, and the others fail at their next collective.
        if rank_info().world_size == 1 or not _is_broken_connection(error):
            raise
        _complain(RunError(f"stopped, as another rank failed ({str(error).splitlines()[0]})"))
        return 1


def _run(argv: list[str]) -> int:
    config = load_config(RunConfig, argv, prog="moe-train run", description=_ABOUT)
    ranks = rank_info().world_size
    if "RANK" in os.environ and config.nproc not in (1, ranks):
        raise ConfigError(
            f"nproc {config.nproc} asks for ranks of its own, and this process is already one of "
            f"{ranks} (RANK is set); leave nproc away, or unset RANK, LOCAL_RANK and WORLD_SIZE"
        )
    if "RANK" not in os.environ and config.nproc > 1:
        prepare(config, config.nproc)  # a refusal is said once, before any rank starts
        return launch(argv, config.nproc)
    run(config, rank_info())
    leave()
    return 0


def _is_broken_connection(error: RuntimeError) -> bool:
    return isinstance(error, DistError) or "gloo" in str(error)


def _report(argv: list[str]) -> int:
    if len(argv) != 1:
        raise ConfigError(f"report takes one folder, got {len(argv)} arguments")
    print(write_report(Path(argv[0])))  # noqa: T201
    return 0


def _complain(error: BaseException) -> None:
    """Print an error as one line. What all ranks meet alike is told by the first of a machine."""
    rank, local_rank = (os.environ.get(name, "0") for name in ("RANK", "LOCAL_RANK"))
    if local_rank != "0" and isinstance(error, _ALIKE):
        return
    where = "" if rank == "0" or isinstance(error, _REFUSED) else f"rank {rank}: "
    print(f"moe-train: {where}{' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
