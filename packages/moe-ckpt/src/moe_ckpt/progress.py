"""Tell a person how far something is: a bar on a terminal, nothing elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO


def no_progress(done: int, total: int) -> None:
    """Say nothing."""


class Bar:
    """A bar on the standard error stream if that is a terminal.

    Args:
        what: Is being done.
        stream: To write to.

    Examples:
        >>> with Bar("verify") as bar:  # no terminal here, so nothing is written
        ...     bar(512, 1024)
    """

    WIDTH = 30

    def __init__(self, what: str, stream: TextIO | None = None):
        self.what, self.stream = what, sys.stderr if stream is None else stream
        self._shows = self.stream.isatty()
        self._begin, self._last = time.monotonic(), 0.0

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes are done, at most ten times a second."""
        now = time.monotonic()
        if not self._shows or (now - self._last < 0.1 and done < total):
            return
        self._last = now
        part = done / total if total else 1.0
        bar = "#" * round(part * self.WIDTH)
        rate = done / 2**20 / max(now - self._begin, 1e-9)
        self.stream.write(f"\r{self.what} [{bar:{self.WIDTH}}] {part:4.0%} {rate:6.0f} MiB/s")
        self.stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._shows and self._last:
            self.stream.write("\n")
