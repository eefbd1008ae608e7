"""Where every rank is, kept in the store, so that a run that hangs says who waits for whom."""

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from moe_parallel.mesh import Mesh


class Beat(NamedTuple):
    """What a rank last said of itself.

    Attributes:
        step: The step.
        where: What it was doing.
        seconds: For how long, when it said so.
    """

    step: int
    where: str
    seconds: float


class Heartbeat:
    """Writes where this rank is to the store, and reports when it has been there for too long.

    A thread does both, so it works while the rank is stuck in a collective (which releases the
    interpreter). ``at`` costs two assignments. The report has a line for each rank, the stacks of
    this rank's threads, and the last collectives from the flight recorder if that is on
    (``TORCH_FR_BUFFER_SIZE``).

    Args:
        mesh: This rank's place.
        store: Shared by the ranks; it needs none in a world of one. It is used from a thread, so
            give one that nobody else waits on.
        interval: Seconds between two beats.
        stall_after: Seconds at one place after which a report is made, once for that place.
        on_stall: Gets the report. None writes it to standard error.

    Examples:
        >>> from moe_parallel import Mesh, plan_mesh
        >>> with Heartbeat(Mesh.create(plan_mesh(1)), interval=60.0) as heartbeat:
        ...     heartbeat.at(3, "forward")
        ...     print(heartbeat.table())
        step 3, forward, ...: rank 0
    """

    def __init__(
        self,
        mesh: Mesh,
        store: dist.Store | None = None,
        *,
        interval: float = 5.0,
        stall_after: float = 300.0,
        on_stall: Callable[[str], None] | None = None,
    ):
        if store is None and mesh.plan.world_size > 1:
            raise ValueError(f"a heartbeat of {mesh.plan.world_size} ranks needs a store")
        if not 0 < interval <= stall_after:
            raise ValueError(
                f"interval must be positive and at most stall_after={stall_after}, got {interval}"
            )
        self._mesh, self._store, self._interval = mesh, store, interval
        self._stall_after = stall_after
        self._on_stall = on_stall or _to_stderr
        self._place: tuple[int, str, float] = (0, "start", time.monotonic())
        self._reported: tuple[int, str, float] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def at(self, step: int, where: str) -> None:
        """Say where this rank is."""
        self._place = step, where, time.monotonic()

    def watch(self, op: object) -> None:
        """Say which operation of a pipeline this rank is at: for ``Pipeline(watch=...)``."""
        self._place = self._place[0], str(op), time.monotonic()

    def beats(self) -> dict[int, Beat | None]:
        """Return what each rank last said; None for one that never spoke."""
        found: dict[int, Beat | None] = {}
        for rank in range(self._mesh.plan.world_size):
            if rank == self._mesh.rank or self._store is None:
                step, where, since = self._place
                found[rank] = Beat(step, where, time.monotonic() - since)
            elif self._store.check([_key(rank)]):
                found[rank] = Beat(*json.loads(self._store.get(_key(rank))))
            else:
                found[rank] = None
        return found

    def table(self) -> str:
        """Return where the ranks are, those at one place on one line, the longest there first."""
        places: dict[tuple[int, str], list[int]] = {}
        seconds: dict[tuple[int, str], float] = {}
        for rank, beat in self.beats().items():
            key = (-1, "no sign of life") if beat is None else (beat.step, beat.where)
            places.setdefault(key, []).append(rank)
            seconds[key] = max(seconds.get(key, 0.0), 0.0 if beat is None else beat.seconds)
        lines = []
        for key, ranks in sorted(places.items(), key=lambda item: -seconds[item[0]]):
            where = key[1] if key[0] < 0 else f"step {key[0]}, {key[1]}, {seconds[key]:.0f} s"
            listed = ", ".join(map(str, ranks))
            lines.append(f"{where}: rank{'s' * (len(ranks) > 1)} {listed}")
        return "\n".join(lines)

    def _run(self) -> None:
        while True:
            place = self._place
            seconds = time.monotonic() - place[2]
            if self._store is not None:
                beat = json.dumps(Beat(place[0], place[1], seconds))
                self._store.set(_key(self._mesh.rank), beat)
            if seconds > self._stall_after and self._reported != place:
                self._reported = place
                self._on_stall(self._report(place, seconds))
            if self._end.wait(self._interval):
                return

    def _report(self, place: tuple[int, str, float], seconds: float) -> str:
        step, where, _ = place
        return "\n".join(
            [
                f"rank {self._mesh.rank} has been at step {step}, {where} for {seconds:.0f} s",
                self.table(),
                *_stacks(),
                *_collectives(),
            ]
        )


def _key(rank: int) -> str:
    return f"moe_parallel/heartbeat/{rank}"


def _to_stderr(report: str) -> None:
    sys.stderr.write(report + "\n")
    sys.stderr.flush()


def _stacks() -> list[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]


def _collectives(last: int = 5) -> list[str]:
    """Return the last collectives of this rank, from the flight recorder."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    entries: list[dict[str, Any]] = json.loads(dump()).get("entries", [])
    return [
        f"collective {entry.get('collective_seq_id')}: {entry.get('profiling_name')}, "
        f"{entry.get('state')}"
        for entry in entries[-last:]
    ]
