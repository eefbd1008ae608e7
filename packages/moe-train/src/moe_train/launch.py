"""Start the ranks of a run on this machine and see them to their end.

The workers find the environment that torchrun gives, so the same worker runs under either, and
``init_process_group`` with its default ``env://`` joins them. The parent serves the store.

What the parent promises:

* A first SIGINT, SIGTERM, SIGHUP or SIGUSR1 reaches every worker once, as SIGTERM; a worker saves
  at the next step boundary and leaves. A second one kills.
* When a worker fails, the others are asked to leave, and killed if they do not.
* When the parent itself is killed, the kernel sends the workers SIGTERM.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

from torch.distributed import TCPStore

# Ask the kernel for SIGTERM at the parent's death (PR_SET_PDEATHSIG is 1 and survives exec), then
# become the worker. Doing so between fork and exec would run Python in a copy of a process whose
# other threads, the store's among them, may have held locks.
_TRAMPOLINE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
ONE_REQUEST = 1.0
"""Seconds within which further signals belong to the first: who starts a run with another program,
such as ``uv run``, gets a signal to the whole group twice, once through that program."""
_EXPLAINED = (2,)  # a refusal, of which the worker itself has said why
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def launch(
    argv: list[str], nproc: int, *, command: Sequence[str] | None = None, grace: float = 10.0
) -> int:
    """Run ``nproc`` workers and return the exit code of the whole: 0 only if all succeed.

    Call it from the main thread: it handles signals while the workers run.

    Args:
        argv: Arguments of each worker.
        nproc: Number of workers.
        command: What to run before ``argv``; by default ``python -m moe_train run``.
        grace: Seconds from the SIGTERM that follows a failure to the SIGKILL.

    Returns:
        0, or the exit code of the first worker that failed (128 + signal if one ended it).

    Raises:
        ValueError: If ``nproc`` is less than 1.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    command = command or (sys.executable, "-m", "moe_train", "run")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stop = _Stop()
    # What the caller ignores stays ignored: SIGHUP under nohup, SIGINT in a shell's background.
    numbers = [n for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, stop.ask) for number in numbers}
    try:
        for rank in range(nproc):
            environment = os.environ | worker_environment(rank, nproc, store.port)
            stop.start([*command, *argv], environment)
        return _wait(stop, grace)
    finally:
        stop.kill()
        stop.join()
        for number, handler in previous.items():
            signal.signal(number, handler)


def worker_environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """Return the variables that a worker finds beyond those of the parent.

    Args:
        rank: The worker's rank.
        nproc: Number of workers, all on this machine.
        port: Where the parent serves the store.
    """
    cores = len(os.sched_getaffinity(0))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        # More threads than cores wait for each other inside every operation.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // nproc)),
        # gloo would look up this machine's name, which need not resolve.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or "lo",
    }


class _Exit(NamedTuple):
    rank: int
    code: int  # negative: ended by that signal


class _Stop:
    """The workers, and what has been asked of them.

    Attributes:
        exits: The ends of workers in the order in which they came.
        workers: By rank.
        signal: The first signal that asked for a stop, or None.
    """

    def __init__(self) -> None:
        self.exits: queue.SimpleQueue[_Exit] = queue.SimpleQueue()
        self.workers: list[subprocess.Popen[bytes]] = []
        self.signal: int | None = None
        self._asked = 0.0
        self._waits: list[threading.Thread] = []

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        rank, parent = len(self.workers), str(os.getpid())
        trampoline = [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, parent]
        # A group of its own: a terminal sends Ctrl-C to the group of the parent, so the worker
        # gets it from the parent alone.
        worker = subprocess.Popen([*trampoline, *command], env=environment, process_group=0)
        self.workers.append(worker)
        wait = threading.Thread(
            target=lambda: self.exits.put(_Exit(rank, worker.wait())), daemon=True
        )
        wait.start()
        self._waits.append(wait)
        if self.signal is not None:  # it came between two starts
            worker.send_signal(signal.SIGTERM)

    def ask(self, number: int, _: FrameType | None = None) -> None:
        """Handle a signal to the parent: the first asks every worker to leave, the next kills."""
        if self.signal is None:
            self.signal, self._asked = number, time.monotonic()
            self.terminate()
        elif time.monotonic() - self._asked > ONE_REQUEST:
            self.kill()

    def terminate(self) -> None:
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)  # nothing, if it has ended

    def kill(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                # Its whole group, as a data loader's processes would outlive it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)

    def join(self) -> None:
        for wait in self._waits:
            wait.join()


def _wait(stop: _Stop, grace: float) -> int:
    """Wait for every worker; see the others out once one has failed."""
    first: _Exit | None = None
    deadline = float("inf")
    for _ in stop.workers:
        while True:
            try:
                # Short, so that a signal's handler runs soon.
                ended = stop.exits.get(timeout=0.2)
                break
            except queue.Empty:
                if time.monotonic() > deadline:
                    stop.kill()
                    deadline = float("inf")
        if ended.code and first is None:
            first, deadline = ended, time.monotonic() + grace
            stop.terminate()
    if first is None:
        return 0
    if stop.signal is not None and first.code < 0:
        name = signal.Signals(stop.signal).name
        sys.stderr.write(f"stopped by {name} before the workers had saved\n")
        sys.stderr.flush()
        return 128 + stop.signal
    elif first.code not in _EXPLAINED:
        sys.stderr.write(f"rank {first.rank} failed first: {_describe(first.code)}\n")
    sys.stderr.flush()
    return first.code if first.code > 0 else 128 - first.code


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"ended by signal {-code}"
