"""Ranks that stay alive between the examples of a property-based test.

Starting processes and a process group takes seconds; a collective on small tensors takes less
than a millisecond. So a pool starts its ranks once and then runs one drawn case after another
on them::

    @given(dispatch_cases(max_world_size=4))
    def test_property(pool, case):
        results = pool.run(program, case.world_size, case)
        assert ...                                   # here, in the parent

``program`` is a function of a module, and is called as ``program(group, *args)`` on each of the
first ``world_size`` ranks. It computes; the test asserts. That way a failed property leaves
every rank at the same point and the pool stays usable while Hypothesis shrinks the case.

If a rank raises, dies or hangs, the ranks may have lost step. The pool then stops them all,
reports what each one did, and starts afresh at the next case.
"""

import faulthandler
import importlib.util
import inspect
import itertools
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist


class RankError(AssertionError):
    """A program raised, died or hung. The message says what each rank did."""


class _Rank(NamedTuple):
    process: mp.process.BaseProcess
    pipe: Connection
    stacks: Path


class RankPool:
    """A fixed number of gloo ranks on this machine.

    Args:
        size: The largest ``world_size`` that can be asked for.
        timeout: Seconds that one case may take.
    """

    def __init__(self, size: int, timeout: float = 60):
        self.size, self.timeout = size, timeout
        self._ranks: list[_Rank] = []
        self._directory = tempfile.TemporaryDirectory(prefix="rank-pool-")
        self._starts = 0
        # The parent serves the store on a port that the system picks. A port that is chosen
        # first and opened later can be taken by somebody else in between.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._directory.cleanup()

    def run(self, program: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Run ``program(group, *args)`` on ``world_size`` ranks and return what they return.

        Raises:
            RankError: If a rank raised, died or took longer than ``timeout``.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size must be in 1..{self.size}, got {world_size}")
        if not self._ranks:
            self._start()
        ranks = self._ranks[:world_size]
        for rank in ranks:
            _send(rank.pipe, (_locate(program), world_size, args))
        try:
            answers = self._collect(ranks)
        except BaseException:  # interrupted, so answers of this case are still to come
            self.stop()
            raise
        if any(not ok for ok, _ in answers):
            self.stop()
            raise RankError("".join(f"\n--- rank {r}: {a}" for r, (_, a) in enumerate(answers)))
        return [value for _, value in answers]

    def stop(self) -> None:
        """End every rank. The next ``run`` starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()
        self._ranks = []

    def _start(self) -> None:
        # A fork server that has imported the slow modules starts a rank in milliseconds, and
        # unlike fork it never copies the threads of the test process.
        context = mp.get_context("forkserver")
        slow = ["torch", "torch.distributed", "triton", "hypothesis", "pytest", __name__]
        context.set_forkserver_preload([name for name in slow if name in sys.modules])
        self._starts += 1
        directory = Path(self._directory.name)
        for r in range(self.size):
            ours, theirs = context.Pipe()
            stacks = directory / f"stacks-{self._starts}-{r}"
            args = (r, self.size, self._store.port, f"start-{self._starts}", stacks, theirs)
            process = context.Process(target=_main, args=args, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, stacks))
        for r, (ok, answer) in enumerate(self._collect(self._ranks)):
            if not ok:
                self.stop()
                raise RankError(f"rank {r} did not start: {answer}")

    def _collect(self, ranks: list[_Rank]) -> list[tuple[bool, Any]]:
        deadline = time.monotonic() + self.timeout
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < len(ranks):
            pending = [rank.pipe for r, rank in enumerate(ranks) if r not in answers]
            ready = wait(pending, timeout=max(0, deadline - time.monotonic()))
            if not ready:
                break
            for r, rank in enumerate(ranks):
                if rank.pipe in ready:
                    answers[r] = _receive(rank)
                    if not answers[r][0]:  # the others may now wait for it forever
                        deadline = min(deadline, time.monotonic() + 1)
        missing = {r: (False, _stack(ranks[r])) for r in range(len(ranks)) if r not in answers}
        return [{**answers, **missing}[r] for r in range(len(ranks))]


def _send(pipe: Connection, value: Any) -> None:
    # Connection.send would pass tensors as shared memory, which dies with the process that
    # made it and uses up file descriptors. Plain pickle copies the values.
    pipe.send_bytes(pickle.dumps(value))


def _recv(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _receive(rank: _Rank) -> tuple[bool, Any]:
    try:
        return _recv(rank.pipe)
    except EOFError:
        rank.process.join()
        return False, f"died with exit code {rank.process.exitcode}"


def _stack(rank: _Rank) -> str:
    if rank.process.pid is not None:
        os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.2)
    return f"still running after the timeout\n{rank.stacks.read_text()}"


def _locate(program: Callable[..., Any]) -> tuple[str, str, str]:
    # pytest imports test files under names that another process cannot import, so a program
    # travels as the path of its file and its name there.
    return program.__module__, inspect.getsourcefile(program) or "", program.__name__


def _load(located: tuple[str, str, str], cache: dict[str, ModuleType]) -> Callable[..., Any]:
    module, path, name = located
    if path not in cache:
        spec = importlib.util.spec_from_file_location(module, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} must be a function of a module in a file, not of {path!r}")
        # What the program returns is pickled by the name of its module, and pickle looks up the
        # packages above a dotted name, which exist only in the process of the tests.
        for above in itertools.accumulate(module.split(".")[:-1], "{}.{}".format):
            sys.modules.setdefault(above, ModuleType(above))
        cache[path] = sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(cache[path])
    return getattr(cache[path], name)


def _main(rank: int, size: int, port: int, prefix: str, stacks: Path, pipe: Connection) -> None:
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port)),
            rank=rank,
            world_size=size,
            timeout=timedelta(hours=1),  # the parent keeps the time
        )
        groups = [dist.new_group(list(range(w))) for w in range(1, size + 1)]
        _send(pipe, (True, None))
        cache: dict[str, ModuleType] = {}
        while True:
            try:
                located, world_size, args = _recv(pipe)
            except EOFError:  # the parent has gone
                return
            try:
                program = _load(located, cache)
                _send(pipe, (True, program(groups[world_size - 1], *args)))
            except BaseException:
                _send(pipe, (False, traceback.format_exc()))
