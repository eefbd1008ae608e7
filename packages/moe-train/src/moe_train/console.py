"""What a run says while it runs: one live line on a terminal, plain lines elsewhere."""

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Self, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_WINDOW = 50  # updates over which the time left is estimated
_REFRESH = 0.1  # seconds between two drawings of the live line
_ROUTERS = "routers: "
_HEALTH = (
    ("largest/mean", "expert_requested"),
    ("of ranks", "rank_requested"),
    ("from even", "distance"),
    ("never selected", "never_selected"),
)


class Console:
    """The console of one run; a context manager.

    Output never stops a run: once the reader of a pipe has gone, it goes nowhere.

    Args:
        total_steps: The step at which the run ends.
        first_step: The step at which it starts, more than 0 on resume.
        enabled: False on every rank but 0; then nothing is printed.
        stream: Where to print; standard output by default.
        interval: Seconds between two plain lines.
        clock: Seconds, for tests.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        enabled: bool = True,
        *,
        stream: TextIO | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps, self.step = total_steps, first_step
        self._interval, self._clock = interval, clock
        self._record: Mapping[str, Any] = {}
        self._validation: float | None = None
        self._times: deque[tuple[float, int]] = deque([(clock(), first_step)], maxlen=_WINDOW)
        self._drawn = -math.inf
        target = sys.stdout if stream is None else stream
        self._stream = _Unbreakable(target) if enabled and target is not None else None
        self._live: Live | None = None
        if self._stream is not None and self._stream.isatty():
            file = cast(TextIO, self._stream)
            rich = RichConsole(file=file, highlight=False, emoji=False, markup=False)
            if rich.is_terminal and not rich.is_dumb_terminal:
                self._live = Live(console=rich, auto_refresh=False, get_renderable=self._line)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, record: Mapping[str, Any]) -> None:
        """Show a record of kind ``train``; remember the loss of one of kind ``eval``.

        Drawing is limited to what an eye can follow, so this may be called at every step.
        """
        if record["kind"] == "eval":
            self._validation = record["loss"]
        if record["kind"] != "train" or self._stream is None:
            return
        now = self._clock()
        self._record, self.step = record, record["step"]
        self._times.append((now, self.step))
        last = self.step >= self.total_steps
        wait = self._interval if self._live is None else _REFRESH
        if now - self._drawn < wait and not last:
            return
        self._drawn = now
        if self._live is None:
            self._stream.write("  ".join(self._parts()) + "\n")
            self._stream.flush()
        else:
            self._live.refresh()

    def say(self, message: str) -> None:
        """Print lines; on a terminal they stand above the live line."""
        if self._live is not None:
            self._live.console.print(Text(message), soft_wrap=True)
        elif self._stream is not None:
            self._stream.write(message + "\n")
            self._stream.flush()

    def time_left(self) -> float | None:
        """Return the seconds left at the pace of the last updates, or None if there is none."""
        (start, first), (end, last) = self._times[0], self._times[-1]
        if last <= first or end <= start:
            return None
        return (self.total_steps - last) * (end - start) / (last - first)

    def _parts(self) -> list[str]:
        """Return the words of the line; the first are the last to go where room is short."""
        width = len(str(self.total_steps))
        parts = [f"step {self.step:{width}}/{self.total_steps}"]
        record, left = self._record, self.time_left()
        # A figure of a run that is no model's is never shown without saying so.
        parts += [f"[{label.partition(': d')[0]}]" for label in record.get("labels", [])]
        if "loss" in record:
            parts.append(f"loss {record['loss']:.3f}" + (" skipped" * bool(record.get("skipped"))))
        if left is not None:
            parts.append(f"left {format_duration(left)}")
        if "tokens_per_second" in record:
            parts.append(f"{_short(record['tokens_per_second'])} tokens/s")
        if record.get("mfu") is not None:
            parts.append(f"MFU {100 * record['mfu']:.1f} %")
        if alarms := record.get("alarms"):
            parts.append(f"{len(alarms)} alarm{'s' * (len(alarms) > 1)}")
        if "imbalance" in record:
            parts.append(f"imbalance {record['imbalance']:.2f}")
        if self._validation is not None:
            parts.append(f"validation {self._validation:.3f}")
        return parts

    def _line(self) -> RenderableType:
        width = self._live.console.width if self._live is not None else 80
        parts = self._parts()
        while len(parts) > 1 and len("  ".join(parts)) > width:
            parts.pop()
        words = Text("  ".join(parts), no_wrap=True, overflow="ellipsis")
        words.highlight_words(["loss", "left", "tokens/s", "imbalance", "validation"], "dim")
        words.highlight_words(["skipped", "nan", "inf", "alarm", "alarms"], "bold red")
        line = Table.grid(padding=(0, 2), expand=False)
        room = width - len(words) - 2
        if room >= 8:
            bar = ProgressBar(max(1, self.total_steps), self.step, width=min(room, 30))
            line.add_row(words, bar)
        else:
            line.add_row(words)
        health = Text(self._health(width), style="dim", no_wrap=True, overflow="ellipsis")
        return Group(line, health) if health else line

    def _health(self, width: int) -> str:
        """Return a line on the routers: each layer's numbers, or the worst where room is short."""
        columns = [(name, self._record.get(key)) for name, key in _HEALTH]
        known = [(name, values) for name, values in columns if isinstance(values, list) and values]
        if not known:
            return ""
        full = "  ".join(f"{name} {' '.join(f'{x:.3g}' for x in values)}" for name, values in known)
        if len(_ROUTERS + full) <= width:
            return _ROUTERS + full
        parts = [f"{name} up to {max(values):.3g} (layer {values.index(max(values))})"
                 for name, values in known]  # fmt: skip
        while len(parts) > 1 and len(_ROUTERS + "  ".join(parts)) > width:
            parts.pop()
        return _ROUTERS + "  ".join(parts)


def format_duration(seconds: float) -> str:
    """Write seconds as a clock does.

    Examples:
        >>> format_duration(59.6), format_duration(3661), format_duration(200_000)
        ('1:00', '1:01:01', '2d 7:33:20')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02}"
    return f"{days}d {hour}:" * bool(days) + f"{hour}:" * (not days) + f"{minute:02}:{second:02}"


def _short(number: float) -> str:
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}" if number < 1e9 else f"{number:.3g}"
    return f"{number:.3g}"


class _Unbreakable:
    """A stream whose reader may go away.

    rich ends the process when a pipe breaks, and Python complains at exit; a run that has hours
    behind it should do neither because `head` has seen enough.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        # What the stream cannot spell, such as a bar under the C locale, is shown as "?".
        spelt = text.encode(self.encoding, "replace").decode(self.encoding)
        self._try(lambda stream: stream.write(spelt))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return bool(self._try(lambda stream: stream.isatty()))

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()

    def _try(self, action: Callable[[TextIO], Any]) -> Any:
        if self._stream is None:
            return None
        try:
            return action(self._stream)
        except (OSError, ValueError):  # a broken pipe; a closed file
            with contextlib.suppress(OSError, ValueError):
                # Python flushes what is left at exit: let that succeed.
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
            self._stream = None
            return None
