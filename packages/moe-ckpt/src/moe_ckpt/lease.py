"""One writer to a place in an object store: a lock that its holder has to keep renewing.

An object store knows no process that died. So the holder rewrites the lock every ``BEAT_SECONDS``,
and who finds a lock watches it for ``LEASE_SECONDS``: if it changes, somebody is alive; if it does
not, it is taken over. No clocks of two machines are compared. Every write is conditional on the
lock being what was last seen, which S3 and Google Cloud Storage decide in one place.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from moe_ckpt.errors import RootLockedError
from moe_ckpt.objects import ObjectPath
from moe_ckpt.threads import beside

BEAT_SECONDS = 5.0
LEASE_SECONDS = 20.0
logger = logging.getLogger(__name__)


class Lease:
    """The right to save to a root, from ``with`` to its end.

    Args:
        root: Of the run.
        step: That is being saved, for who is refused.
        nonce: Of this save.

    Raises:
        RootLockedError: On entering, if somebody else is saving there.
    """

    def __init__(self, root: ObjectPath, step: int, nonce: str):
        self.place = root / ".lock"
        me = {"host": socket.gethostname(), "pid": os.getpid(), "step": step}
        self._me = {**me, "lease": nonce}
        self._beats, self._seen = 0, b""
        self._lock, self._end = threading.Lock(), threading.Event()
        self._join: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        found = self.place.store.read(self.place.key).result()
        if found.state == "value":
            time_left = time.monotonic() + LEASE_SECONDS
            while time.monotonic() < time_left:
                again = self.place.store.read(self.place.key).result()
                if again.state != "value":
                    found = again
                    break
                if again.stamp.generation != found.stamp.generation:
                    raise self._refused(again.value)
                time.sleep(LEASE_SECONDS / 16)
        self._seen = found.stamp.generation
        if not self._write():
            raise self._refused(b"a process that was faster")
        try:
            self._join = beside(self._keep, "lease")
        except RuntimeError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end.set()
        if self._join is not None:
            self._join()
        try:
            self.place.store.write(self.place.key, None, if_equal=self._seen).result()
        except ValueError as failure:  # the save stands; the next one waits for the lease to end
            logger.warning("%s was left behind: %s", self.place, failure)

    def _write(self) -> bool:
        with self._lock:
            self._beats += 1
            data = json.dumps({**self._me, "beat": self._beats}).encode()
            stamp = self.place.store.write(self.place.key, data, if_equal=self._seen).result()
            if not stamp.generation:
                return False
            self._seen = stamp.generation
            return True

    def _keep(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            if not self._write():
                return

    def _refused(self, holder: bytes) -> RootLockedError:
        return _refused(self.place.parent, holder)


def check_held(root: ObjectPath, nonce: str) -> None:
    """Make sure that a save still has its lease, just before it commits.

    Raises:
        RootLockedError: If it was lost, which takes a pause longer than the lease.
    """
    place = root / ".lock"
    holder = place.read_bytes() if place.is_file() else b"{}"
    if json.loads(holder).get("lease") != nonce:
        raise _refused(root, holder)


def _refused(root: ObjectPath, holder: bytes) -> RootLockedError:
    text = holder.decode(errors="replace")
    return RootLockedError(f"{root} is being saved to by {text}: one run writes to one root")
