"""What the launcher promises, with small scripts as workers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from moe_train.launch import launch

PYTHON = (sys.executable, "-I", "-S", "-c")
# A worker that notes SIGTERM, waits for it, and then leaves as told.
OBEDIENT = """
import os, signal, sys, time
here, code = sys.argv[1], int(sys.argv[2])
rank = os.environ["RANK"]
def leave(*_):
    with open(f"{here}/term-{rank}", "a") as file:
        file.write("x")
    sys.exit(code)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, lambda *_: open(f"{here}/int-{rank}", "w"))
open(f"{here}/ready-{rank}", "w")
time.sleep(60)
"""
# The launcher in a process of its own, so that it can be sent signals.
PARENT = """
import signal, sys
from moe_train.launch import launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
sys.exit(launch({argv!r}, 2, command={command!r}))
"""


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 40
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"no {paths}"
        time.sleep(0.02)


def start_parent(script: str, *argv: str, **options: bool) -> subprocess.Popen[str]:
    program = PARENT.format(argv=list(argv), command=[*PYTHON, script])
    return subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, **options
    )


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_all_succeed_gives_zero_and_each_worker_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = (
        "import os, sys\n"
        "e = os.environ\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS'\n"
        "group = os.getpgid(0) == os.getpid()\n"
        "words = [e[n] for n in names.split()] + [str(group), *sys.argv[2:]]\n"
        "open(sys.argv[1] + '/' + e['RANK'], 'w').write(' '.join(words))"
    )
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert launch([str(tmp_path), "--a b"], 3, command=(*PYTHON, script)) == 0
    for rank in range(3):
        expected = f"{rank} {rank} 3 3 127.0.0.1 {threads} True --a b"
        assert (tmp_path / str(rank)).read_text() == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch([str(tmp_path)], 1, command=(*PYTHON, script)) == 0
    assert (tmp_path / "0").read_text() == "0 0 1 1 127.0.0.1 7 True"


def test_a_failure_asks_the_others_to_leave_and_names_the_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not all(os.path.exists(f'{sys.argv[1]}/ready-{r}') for r in (0, 2)):\n"
        "        time.sleep(0.01)\n"
        "    sys.exit(7)\n" + OBEDIENT
    )
    assert launch([str(tmp_path), "3"], 3, command=(*PYTHON, script)) == 7
    assert capfd.readouterr().err == "rank 1 failed first: exit code 7\n"
    assert sorted(p.name for p in tmp_path.glob("term-*")) == ["term-0", "term-2"]


def test_a_worker_that_ignores_the_request_is_killed_with_its_children(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = (
        "import os, signal, subprocess, sys, time\n"
        "here = sys.argv[1]\n"
        "if os.environ['RANK'] == '0':\n"
        "    while not os.path.exists(here + '/pids'): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "open(here + '/pids.tmp', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename(here + '/pids.tmp', here + '/pids')\n"
        "time.sleep(60)"
    )
    start = time.monotonic()
    assert launch([str(tmp_path)], 2, command=(*PYTHON, script), grace=0.5) == 128 + 11
    assert time.monotonic() - start < 20
    assert capfd.readouterr().err == "rank 0 failed first: ended by SIGSEGV\n"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 5
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_every_worker_once_as_sigterm(
    tmp_path: Path, number: signal.Signals
) -> None:
    parent = start_parent(OBEDIENT, str(tmp_path), "0", start_new_session=True)
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    # To the whole group, as a terminal does.
    os.killpg(parent.pid, number)
    assert parent.wait(timeout=60) == 0
    assert parent.communicate()[1] == ""
    assert [(tmp_path / f"term-{r}").read_text() for r in range(2)] == ["x", "x"]
    assert not list(tmp_path.glob("int-*"))


def test_a_second_signal_kills(tmp_path: Path) -> None:
    slow = OBEDIENT.replace("sys.exit(code)", "time.sleep(60)")
    parent = start_parent(slow, str(tmp_path), "0")
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    parent.send_signal(signal.SIGINT)
    wait_for(tmp_path / "term-0", tmp_path / "term-1")
    parent.send_signal(signal.SIGINT)  # at once: the same request, by another way
    time.sleep(1.2)
    assert parent.poll() is None  # a worker may take its time to save
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=60) == 128 + signal.SIGINT
    assert parent.communicate()[1] == "stopped by SIGINT before the workers had saved\n"


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    parent = start_parent(OBEDIENT, str(tmp_path), "0")
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    parent.kill()
    parent.communicate()
    wait_for(tmp_path / "term-0", tmp_path / "term-1")


def test_workers_join_through_the_environment_alone(tmp_path: Path) -> None:
    script = (
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.tensor([2.0 ** dist.get_rank()])\n"
        "dist.all_reduce(x)\n"
        "open(sys.argv[1] + '/' + os.environ['RANK'], 'w').write(str(x.item()))\n"
        "dist.destroy_process_group()"
    )
    assert launch([str(tmp_path)], 2, command=(sys.executable, "-c", script)) == 0
    assert [(tmp_path / str(r)).read_text() for r in range(2)] == ["3.0", "3.0"]


def test_the_callers_handlers_come_back() -> None:
    def mine(*_: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGTERM, mine)
    try:
        assert launch([], 1, command=(*PYTHON, "pass")) == 0
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_the_caller_ignores_stays_ignored(tmp_path: Path) -> None:
    script = "import os, signal\nos.kill(os.getppid(), signal.SIGHUP)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch([], 2, command=(*PYTHON, script)) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="nproc must be at least 1, got 0"):
        launch([], 0)
