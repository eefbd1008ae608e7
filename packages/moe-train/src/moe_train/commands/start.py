"""Start the work of a command on one rank, here, or on several."""

import os
import sys
from collections.abc import Callable
from typing import TypeVar

from moe_parallel import leave

from moe_train.config import RunConfig
from moe_train.launch import launch
from moe_train.load_config import ConfigError
from moe_train.ranks import RankInfo, rank_info

Config = TypeVar("Config", bound=RunConfig)


def start(
    name: str,
    argv: list[str],
    config: Config,
    work: Callable[[Config, RankInfo], None],
    prepare: Callable[[Config, int], object] = lambda *_: None,
) -> int:
    """Do the work of a command on ``config.nproc`` ranks of this machine, or as one of torchrun's.

    Args:
        name: Of the command, which workers are started with.
        argv: Its words, which workers are started with.
        config: Made of them.
        work: What each rank does.
        prepare: Refuses what cannot be, with the number of ranks, before any rank is started.

    Returns:
        The exit code.

    Raises:
        ConfigError: If ranks are asked for by a process that is one of several already.
    """
    ranks = rank_info().world_size
    if "RANK" in os.environ and config.nproc not in (1, ranks):
        raise ConfigError(
            f"nproc {config.nproc} asks for ranks of its own, and this process is already one of "
            f"{ranks} (RANK is set); leave nproc away, or unset RANK, LOCAL_RANK and WORLD_SIZE"
        )
    if "RANK" not in os.environ and config.nproc > 1:
        prepare(config, config.nproc)  # a refusal is said once, before any rank starts
        return launch(argv, config.nproc, command=[sys.executable, "-m", "moe_train", name])
    work(config, rank_info())
    leave()
    return 0
