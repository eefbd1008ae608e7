"""What the console prints, on a terminal and elsewhere."""

import io
import math
import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_train.console import Console, format_duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def train(step: int, **changes: Any) -> dict[str, Any]:
    record = {
        "kind": "train",
        "step": step,
        "loss": 2.3456,
        "tokens_per_second": 12345.0,
        "imbalance": 1.567,
        "skipped": False,
    }
    return record | changes


def visible(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


def test_a_plain_line_tells_all_and_the_time_left_follows_the_pace() -> None:
    out, clock = io.StringIO(), Clock()
    with Console(1000, 100, stream=out, clock=clock) as console:
        clock.now += 30
        console.update({"kind": "eval", "step": 100, "loss": 2.5, "tokens": 1})
        console.update(train(110))  # 3 s a step, 890 to go
    assert out.getvalue() == (
        "step  110/1000  loss 2.346  left 44:30  12.3k tokens/s  imbalance 1.57  validation 2.500\n"
    )


def test_plain_lines_come_at_the_interval_and_at_the_end() -> None:
    out, clock = io.StringIO(), Clock()
    with Console(20, 0, stream=out, clock=clock, interval=5) as console:
        for step in range(1, 21):
            clock.now += 1
            console.update(train(step))
    steps = [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert steps == [1, 6, 11, 16, 20]


def test_a_skipped_step_and_a_loss_that_is_not_finite_show() -> None:
    out = io.StringIO()
    with Console(9, 0, stream=out, interval=0) as console:
        console.update(train(1, loss=math.nan, skipped=True))
        console.update(train(2, loss=math.inf, tokens_per_second=2.5e6))
    assert "loss nan skipped" in out.getvalue()
    assert "loss inf " in out.getvalue()
    assert "2.5M tokens/s" in out.getvalue()


def test_other_ranks_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with Console(10, 0, False) as console:
        console.update(train(10))
        console.say("hello")
    assert capfd.readouterr() == ("", "")


def test_the_live_line_keeps_what_was_said_above_it() -> None:
    out, clock = Terminal(), Clock()
    with Console(100, 0, stream=out, clock=clock) as console:
        for step in range(1, 101):
            clock.now += 1
            console.update(train(step))
            if step == 50:
                console.say("[bold]resumed[/bold] :smile: from step 3")
    text = visible(out.getvalue())
    assert "[bold]resumed[/bold] :smile: from step 3\n" in text
    assert "step 100/100  loss 2.346  left 0:00  12.3k tokens/s  imbalance 1.57" in text
    assert "━" in text
    assert "\x1b[?25h" in out.getvalue()  # the cursor is back
    # Below what was said, the line is drawn over itself: one line remains of fifty.
    assert text.split("from step 3\n")[1].count("\n") <= 1


HEALTH = {
    "expert_requested": [1.25, 2.5], "rank_requested": [1.0, 1.1], "distance": [0.02, 0.5],
    "never_selected": [0, 3],
}  # fmt: skip


def test_the_live_view_tells_the_health_of_every_layer_and_the_worst_where_room_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = "routers: largest/mean 1.25 2.5  of ranks 1 1.1  from even 0.02 0.5  never selected 0 3"
    for columns, want in (
        (120, full),
        (80, "routers: largest/mean up to 2.5 (layer 1)  of ranks up to 1.1 (layer 1)"),
        (45, "routers: largest/mean up to 2.5 (layer 1)"),
    ):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = Terminal()
        with Console(100, 0, stream=out, clock=Clock()) as console:
            console.update(train(1, **HEALTH))
        lines = [line.rstrip() for line in re.split(r"[\r\n]", visible(out.getvalue()))]
        assert want in lines
    plain = io.StringIO()
    with Console(100, 0, stream=plain, interval=0) as console:
        console.update(train(1, **HEALTH))
    assert "routers" not in plain.getvalue()


def test_labels_and_alarms_stand_on_every_plain_line() -> None:
    out = io.StringIO()
    labels = ["forced routing: uniform", "balance loss per microbatch: depends on the split"]
    with Console(9, 0, stream=out, interval=0) as console:
        console.update(train(1, labels=labels, alarms=["layer 0 starved: 1"], mfu=0.4123))
        console.update(train(2, labels=labels, alarms=["a: 1", "b: 2"], mfu=None))
    first, second = out.getvalue().splitlines()
    assert first.startswith("step 1/9  [forced routing: uniform]  [balance loss per microbatch]  ")
    assert "MFU 41.2 %  1 alarm  imbalance" in first
    assert "  2 alarms  imbalance" in second
    assert "MFU" not in second


@given(columns=st.integers(1, 200), loss=st.floats())
def test_the_live_line_never_exceeds_the_terminal(columns: int, loss: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        out, clock = Terminal(), Clock()
        with Console(10**6, 0, stream=out, clock=clock) as console:
            console.update({"kind": "eval", "step": 0, "loss": loss, "tokens": 1})
            for step in (1, 77777):
                clock.now += 1
                console.update(train(step, loss=loss, **HEALTH))
    lines = re.split(r"[\r\n]", visible(out.getvalue()))
    assert max(map(len, lines)) <= columns
    assert any("step"[: columns - 1] in line for line in lines)


def test_a_bar_is_drawn_where_the_encoding_has_none() -> None:
    raw = io.BytesIO()
    with Console(2, 0, stream=io.TextIOWrapper(raw, "ascii"), interval=0) as console:
        console.say("Café ━")
        console.update(train(2))
        assert raw.getvalue().startswith(b"Caf? ?\nstep 2/2")


PROGRAM = """
import sys, time
from moe_train.console import Console
{prepare}
with Console(1000, 0, interval=0) as console:
    for step in range(1, 1001):
        console.update(dict(kind="train", step=step, loss=1.0))
        console.say("x" * 500)
sys.stderr.write("done")
"""


@pytest.mark.parametrize("prepare", ["", "sys.stdout.close()", "sys.stdout = None"])
def test_a_reader_that_goes_away_does_not_stop_the_run(prepare: str) -> None:
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(prepare=prepare)],
        stdout=write,
        stderr=subprocess.PIPE,
    )
    os.close(write)
    os.close(read)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, b"done")


def test_a_terminal_that_hangs_up_does_not_stop_the_run() -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(prepare="time.sleep(0.5)")],
        stdout=slave,
        stderr=subprocess.PIPE,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(slave)
    os.read(master, 10)  # the live line has begun
    os.close(master)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, b"done")


@given(seconds=st.integers(0, 10**7))
def test_a_duration_reads_back(seconds: int) -> None:
    days, _, clock = format_duration(seconds).rpartition("d ")
    total = int(days or 0) * 86400
    for place, part in enumerate(reversed(clock.split(":"))):
        total += int(part) * 60**place
    assert total == seconds
