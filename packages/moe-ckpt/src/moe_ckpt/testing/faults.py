"""A process that dies, or a call that fails, at a chosen change of the file system."""

import errno
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from unittest import mock

from moe_ckpt import files
from moe_ckpt.array import ChunkWriter

CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "ftruncate")


class Died(BaseException):
    """The process is dead: from here on nothing that it does reaches the disk."""


class Faults:
    """Lets something go wrong at the ``at``-th call that changes or syncs files.

    The calls counted are those of ``os``, the exchange of directories and each chunk given to
    tensorstore. Between ``with`` and its end, in all threads.

    Args:
        at: Counted from 1; 0 counts only.
        dies: If true, that call and every later one raise ``Died``, as if the process had been
            killed; a write may leave half of its bytes. If false, that call alone raises OSError.
        code: The ``errno`` of that OSError.

    Attributes:
        count: Calls so far.
    """

    def __init__(self, at: int, *, dies: bool = False, code: int = errno.ENOSPC):
        self.at, self.dies, self.code, self.count = at, dies, code, 0
        self._lock = threading.Lock()
        self._patches = [mock.patch.object(os, c, self._wrap(c, getattr(os, c))) for c in CALLS]
        self._patches += [
            mock.patch.object(files, "exchange", self._wrap("exchange", files.exchange)),
            mock.patch.object(ChunkWriter, "write", self._wrap("chunk", ChunkWriter.write)),
        ]

    def __enter__(self) -> Self:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for patch in self._patches:
            patch.stop()

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.count += 1
                hit = self.count == self.at
                dead = self.dies and self.at and self.count >= self.at
            if hit and self.dies and name == "write":
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
            if dead:
                raise Died(f"at call {self.count}, {name}")
            if hit:
                raise OSError(self.code, os.strerror(self.code), str(args[0]) if args else None)
            return real(*args, **kwargs)

        return call
