"""Files that survive a crash: durable writes, atomic exchange, one writer at a time."""

import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moe_ckpt import threads
from moe_ckpt.errors import RootLockedError

LOCK = ".lock"
MANY = 128
"""More files or directories than that are made durable together with their whole file system."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
logger = logging.getLogger(__name__)


def sync(path: Path) -> None:
    """Make a file or a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Sequence[Path], at_once: int = 8) -> None:
    """Make many files or directories durable; a file system commits neighbours together."""
    left, errors = deque(paths), list[BaseException]()

    def work() -> None:
        with contextlib.suppress(IndexError):  # another thread took the last one
            while left and not errors:
                try:
                    sync(left.popleft())
                except BaseException as error:
                    errors.append(error)

    # This thread works too: near the end of the interpreter it may be the only one.
    helpers = [threading.Thread(target=work) for _ in range(min(at_once, len(paths)) - 1)]
    helpers = [thread for thread in helpers if threads.start(thread)]
    work()
    for thread in helpers:
        thread.join()
    if errors:
        raise errors[0]


def sync_file_system(path: Path) -> None:
    """Make everything durable that was written to the file system of a directory, by anybody.

    One call for any number of files, where one for each would wait for the disk each time.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file; the caller makes its directory durable, and the file if ``durable`` is not."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_root(root: Path) -> None:
    """Make a directory and those above it, each entry durable."""
    missing = [path for path in [root, *root.parents] if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync(path.parent)


def exchange(first: Path, second: Path) -> None:
    """Swap two directories of one file system, at once where it can.

    Linux swaps them in one step. Where the file system cannot (some network file systems), there
    is a moment in which ``second`` does not exist.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(first), os.fsencode(second)
    if not libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(first), None, str(second))
    aside = first.with_name(first.name + "-aside")
    os.rename(second, aside)
    os.rename(first, second)
    os.rename(aside, first)


def remove(path: Path) -> None:
    """Delete what no reader looks at. Failing is logged, not raised."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s was left behind: %s", path, error)


@contextmanager
def locked(root: Path, step: int) -> Iterator[None]:
    """Be the only process that saves to ``root``.

    The kernel drops the lock of a process that dies, so there is never a stale one.

    Raises:
        RootLockedError: If another process, or another thread of this one, is saving there.
    """
    descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(root, descriptor)
        me = {"host": socket.gethostname(), "pid": os.getpid(), "step": step}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(me).encode(), 0)
        try:
            yield
        finally:
            # Unlock by hand: a child forked meanwhile has a copy of the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _lock(root: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace") or "a process just starting"
        raise RootLockedError(
            f"{root} is being saved to by {holder}: one run writes to one root"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        logger.warning("%s cannot be locked (%s): make sure that one run writes to it", root, error)
