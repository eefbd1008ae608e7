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
    """Read what torchrun, or ``--nproc``, has put into the environment; alone without it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return RankInfo(*(int(os.environ.get(n, d)) for n, d in zip(names, (0, 0, 1), strict=True)))


def pick_device(config: RunConfig, info: RankInfo) -> torch.device:
    """Return the device of this rank and make it the current one.

    Raises:
        RunError: If a GPU is asked for and there is none for this rank.
    """
    wanted, gpus = config.train.device, torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        cores = len(os.sched_getaffinity(0))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
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
    """Join the other ranks, if there are any. Every later wait for them is bounded."""
    if info.world_size == 1:
        return
    # gloo beside NCCL: checkpoints move bytes of the host.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
