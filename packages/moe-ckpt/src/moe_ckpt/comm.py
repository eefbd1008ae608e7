"""How ranks talk: the protocol that a caller supplies, and how ranks fail together."""

import json
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from moe_ckpt.errors import PeerStoppedError, pack, unpack

P = ParamSpec("P")
T = TypeVar("T")


class Communicator(Protocol):
    """Collective operations on bytes. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This process, in ``range(size)``."""
        ...

    @property
    def size(self) -> int:
        """Number of processes that save or load together."""
        ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payload of each rank, in order of rank. Lengths may differ."""
        ...

    def exchange(self, payloads: list[bytes]) -> list[bytes]:
        """Send ``payloads[r]`` to rank r and return what each rank sent here, in order of rank."""
        ...

    def barrier(self) -> None:
        """Wait until every rank is here."""
        ...


class Alone:
    """The communicator of a single process."""

    rank = 0
    size = 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payload."""
        return [payload]

    def exchange(self, payloads: list[bytes]) -> list[bytes]:
        """Return the payloads."""
        return list(payloads)

    def barrier(self) -> None:
        """Do nothing."""


class Together:
    """Work that succeeds on every rank or raises the same error on every rank.

    A rank that fails goes on taking part in the collective operations, doing nothing between
    them, until ``agree`` tells all the others. So no rank waits for one that has left.

    Args:
        comm: The ranks.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.error: BaseException | None = None

    def attempt(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return ``work(...)``, or None if it raises or this rank failed earlier."""
        if self.error is not None:
            return None
        try:
            return work(*args, **kwargs)
        except BaseException as error:
            # An interrupt too has to reach the other ranks before it ends this one.
            self.error = error
            return None

    def agree(self, value: Any = None) -> list[Any]:
        """Return the value of every rank, or raise what went wrong first on all of them.

        Args:
            value: JSON of this rank; ignored if it has failed.

        Raises:
            CheckpointError: The error of the lowest rank that failed by itself. It becomes a
                ``RankFailedError`` if it is not of this package.
        """
        failed, self.error = self.error, None
        error = None if failed is None else pack(failed, self.comm.rank)
        reply = {"error": error, "value": None if failed else value}
        replies = [json.loads(r) for r in self.comm.all_gather(json.dumps(reply).encode())]
        errors = {rank: r["error"] for rank, r in enumerate(replies) if r["error"]}
        if not errors:
            return [r["value"] for r in replies]
        if failed is not None and not isinstance(failed, Exception):
            raise failed
        stopped = PeerStoppedError.__name__
        rank = min(errors, key=lambda r: (errors[r]["class"] == stopped, r))
        prefix = f"rank {rank}: " if self.comm.size > 1 else ""
        raise unpack(errors[rank], prefix) from (failed if rank == self.comm.rank else None)

    def on_first(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Return on every rank what ``work`` returns on rank 0, which alone runs it."""
        value = self.attempt(work, *args, **kwargs) if self.comm.rank == 0 else None
        return self.agree(value)[0]
