"""Ranks as threads of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class _Meeting:
    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=60)
        self.payloads: list[list[bytes]] = [[] for _ in range(size)]


class ThreadCommunicator:
    """One rank among threads that share a meeting.

    Args:
        rank: This thread.
        meeting: Made by ``run_ranks``.
    """

    def __init__(self, rank: int, meeting: _Meeting):
        self.rank, self.size, self._meeting = rank, meeting.barrier.parties, meeting

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payload of each rank."""
        return self.exchange([payload] * self.size)

    def exchange(self, payloads: list[bytes]) -> list[bytes]:
        """Send ``payloads[r]`` to rank r and return what each rank sent here."""
        self._meeting.payloads[self.rank] = [bytes(payload) for payload in payloads]
        self._meeting.barrier.wait()
        received = [sent[self.rank] for sent in self._meeting.payloads]
        self._meeting.barrier.wait()
        return received

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._meeting.barrier.wait()


def run_ranks(size: int, program: Callable[[ThreadCommunicator], T]) -> list[T]:
    """Run ``program(comm)`` on each rank and return what each returned.

    A rank that raises outside of a collective operation leaves the others waiting for a minute.

    Examples:
        >>> run_ranks(2, lambda comm: comm.all_gather(b"rank %d" % comm.rank))
        [[b'rank 0', b'rank 1'], [b'rank 0', b'rank 1']]
    """
    meeting = _Meeting(size)
    with ThreadPoolExecutor(size) as threads:
        comms = [ThreadCommunicator(rank, meeting) for rank in range(size)]
        return list(threads.map(program, comms))
