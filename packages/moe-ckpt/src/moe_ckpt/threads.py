"""Threads that can be had when none can be started any more.

A save in the background may still be running when the main thread has come to its end. From then on
Python 3.12.0 and 3.12.1 start no thread, and no version does once it has waited for all of them.
"""

import contextlib
import queue
import threading
from collections.abc import Callable


def start(thread: threading.Thread) -> bool:
    """Start a thread and return whether that was possible."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


class Standby:
    """A thread that was started early and waits for one piece of work. It ends with the process."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._done = threading.Event()
        threading.Thread(target=self._wait, name="standby", daemon=True).start()
        _waiting.put(self)

    def _wait(self) -> None:
        try:
            self._work.get()()
        finally:
            self._done.set()

    def run(self, work: Callable[[], None]) -> None:
        """Do the work, once."""
        self._work.put(work)

    def join(self) -> None:
        """Wait for the end of the work."""
        self._done.wait()

    @staticmethod
    def dismiss() -> None:
        """End one that waits, if any does."""
        with contextlib.suppress(queue.Empty):
            _waiting.get_nowait().run(lambda: None)


_waiting: queue.SimpleQueue[Standby] = queue.SimpleQueue()


def beside(work: Callable[[], None], name: str) -> Callable[[], None]:
    """Begin to do some work in another thread, one on standby if none can be started.

    Args:
        work: What to do.
        name: Of the thread.

    Returns:
        What waits for the end of the work.

    Raises:
        RuntimeError: If no thread can be started and none is on standby.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        try:
            standby = _waiting.get_nowait()
        except queue.Empty:
            raise error from None
        standby.run(work)
        return standby.join
    return thread.join
