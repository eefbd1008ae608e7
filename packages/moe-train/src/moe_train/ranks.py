"""Ranks: where this process stands, which device it has, and how it joins the others."""

import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from moe_train.config import RunConfig
from moe_train.errors import RunError

TIMEOUT = timedelta(minutes=10)


class RankInfo(NamedTuple):
    """This process among those of the run.

    Attributes:
        rank: In ``0..world_size-1``.
        local_rank: Among those on this machine.
        world_size: Processes of the run.
    """

    rank: int
    local_rank: int
    world_size: int


def rank_info() -> RankInfo:
    """Read what torchrun, or ``--nproc``, has put into the environment; alone without it.

    Raises:
        RunError: If that makes no sense.
    """
    found = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    rank, local_rank, world_size = found.values()
    try:
        info = RankInfo(int(rank or 0), int(local_rank or 0), int(world_size or 1))
    except ValueError as error:
        raise RunError(f"the environment says {found}: these must be whole numbers") from error
    if not (0 <= info.rank < info.world_size and 0 <= info.local_rank <= info.rank):
        raise RunError(
            f"the environment says {found}: RANK must be in 0..WORLD_SIZE-1 and LOCAL_RANK not "
            "above it. Unset them to run alone"
        )
    return info


def pick_device(config: RunConfig, info: RankInfo) -> torch.device:
    """Return the device of this rank and make it the current one.

    Raises:
        RunError: If a GPU is asked for and there is none for this rank.
    """
    wanted, gpus = config.train.device, torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        cores = len(os.sched_getaffinity(0))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if config.train.threads > 4 * cores:
            raise RunError(
                f"train.threads {config.train.threads} is too much for {cores} cores; at most 4 a "
                "core"
            )
        torch.set_num_threads(config.train.threads or max(1, cores // local))
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local > gpus:
        raise RunError(
            f"{local} ranks on this machine need a GPU each and it has {gpus}; start fewer ranks "
            "or set train.device to cpu"
        )
    torch.cuda.set_device(info.local_rank)
    return torch.device("cuda", info.local_rank)


def join(info: RankInfo, device: torch.device) -> None:
    """Join the other ranks, if there are any. Every later wait for them is bounded.

    Raises:
        RunError: If the environment does not say where they meet.
    """
    if info.world_size == 1:
        return
    # gloo beside NCCL: checkpoints move bytes of the host.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except ValueError as error:
        raise RunError(f"rank {info.rank} cannot join the others: {error}") from error
