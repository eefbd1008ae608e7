"""How ranks talk before they share memory: every rank tells all others some bytes."""

import itertools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

TIMEOUT = 60.0
"""Seconds that a rank waits for the others while memory is set up or given back."""


class Meeting(Protocol):
    """The ranks of a group.

    Attributes:
        rank: This rank.
        world_size: W.
    """

    rank: int
    world_size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return what each rank told.

        Raises:
            TimeoutError: Naming the ranks that told nothing.
        """
        ...


class GroupMeeting:
    """The ranks of a process group, by the store that they met in.

    A store works before there is a GPU, whatever the backend of the group, and says who is
    missing. A message is deleted when its sender knows that everyone has read it: when all have
    come to the next one.

    Args:
        group: Of which this process is a member.
        timeout: Seconds to wait for the others.
    """

    _rounds: dict[tuple[int, ...], itertools.count] = {}  # noqa: RUF012 - one count a process

    def __init__(self, group: dist.ProcessGroup, timeout: float = TIMEOUT):
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the group that it was given")
        self.timeout = timeout
        self._ranks = tuple(dist.get_process_group_ranks(group))
        name = "-".join(str(rank) for rank in self._ranks)
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"moe-dispatch/{name}", store)
        self._last = ""

    def gather(self, data: bytes) -> list[bytes]:
        """Return what each rank told."""
        turn = next(self._rounds.setdefault(self._ranks, itertools.count()))
        mine = f"{turn}/{self.rank}"
        self._store.set(mine, "." + data.hex())  # a store may not hold empty values
        keys = [f"{turn}/{rank}" for rank in range(self.world_size)]
        late = self._late(keys)
        if late:
            raise _absent(self.rank, late, self.timeout)
        told = [bytes.fromhex(self._store.get(key).decode()[1:]) for key in keys]
        if self._last:
            self._store.delete_key(self._last)
        self._last = mine
        return told

    def _late(self, keys: list[str]) -> list[int]:
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout))
        except RuntimeError:  # DistStoreError; what matters is who is missing
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        return []


class Crowd:
    """What the threads of one process share. One for each set of virtual ranks."""

    def __init__(self, world_size: int, timeout: float = TIMEOUT):
        self.timeout = timeout
        self.changed = threading.Condition()
        self.turns: list[list[bytes]] = [[] for _ in range(world_size)]


class ThreadMeeting:
    """A virtual rank that is a thread of this process.

    Args:
        rank: This rank.
        crowd: What all of them share.
    """

    def __init__(self, rank: int, crowd: Crowd):
        self.rank, self.world_size, self._crowd = rank, len(crowd.turns), crowd

    def gather(self, data: bytes) -> list[bytes]:
        """Return what each rank told."""
        crowd = self._crowd
        end = time.monotonic() + crowd.timeout
        with crowd.changed:
            crowd.turns[self.rank].append(data)
            turn = len(crowd.turns[self.rank])
            crowd.changed.notify_all()
            while late := [r for r, told in enumerate(crowd.turns) if len(told) < turn]:
                if not crowd.changed.wait(end - time.monotonic()):
                    raise _absent(self.rank, late, crowd.timeout)
            return [told[turn - 1] for told in crowd.turns]


def agree(meeting: Meeting, what: str, value: str) -> None:
    """Refuse, on every rank, that ranks come with different values.

    Raises:
        ValueError: Naming each rank and what it has.
    """
    told = [data.decode() for data in meeting.gather(f"{what}: {value}".encode())]
    if len(set(told)) > 1:
        found = ", ".join(f"rank {rank} has {one}" for rank, one in enumerate(told))
        raise ValueError(f"ranks must open the same thing in the same order: {found}")


def _absent(rank: int, late: Sequence[int], timeout: float) -> TimeoutError:
    names = ", ".join(str(other) for other in late)
    return TimeoutError(f"rank {rank} waited {timeout:.0f} s on the host for rank {names}")
