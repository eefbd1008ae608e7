"""The owner of one row-wise exchange: a piece of symmetric memory, clocks, and what went wrong."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
import triton
from torch import Tensor

from moe_dispatch.failure import PeerError
from moe_dispatch.heaps.protocol import SymmetricHeap
from moe_dispatch.plan import NUM_KINDS, RowPlan
from moe_dispatch.rowwise import protocol
from moe_dispatch.rowwise.agree import kernel as agree_kernels
from moe_dispatch.rowwise.carry import kernel as carry_kernels
from moe_dispatch.rowwise.protocol import Clock, Kind, Op, Step
from moe_dispatch.rowwise.remote import Remote

DEADLINE = 30.0
"""Seconds that a rank waits for the others before it raises."""

# The interpreter has one grid for the whole process, so virtual ranks take turns.
_INTERPRETER = threading.RLock()


def interpreted_in_turn(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel on the current stream; in the interpreter one thread at a time."""
    if isinstance(kernel, triton.JITFunction):
        kernel[grid](*args, **options)
        return
    with _INTERPRETER:
        kernel[grid](*args, **options)


class Event(NamedTuple):
    """A step that a rank took.

    Attributes:
        rank: Who.
        step: What.
        clock: Whose epoch.
        epoch: Of which it was, less its lag.
    """

    rank: int
    step: Step
    clock: Clock
    epoch: int


class Channel:
    """Runs the steps of the protocol on one rank.

    Args:
        plan: The sizes, the same on all ranks.
        heap: Of at least ``plan.heap_bytes``, used by nothing else. ``close`` closes it.
        deadline: Seconds that this rank waits for the others.
        layer: What errors call the exchange, see also ``named``.

    Attributes:
        plan: As given.
        heap: As given.
        layer: As given.
        state: int64, on the device: clocks, failure, overflow. See ``agree/kernel.py``.
        views: The arrays of ``plan.fields()`` in this rank's memory.
        epochs: The clocks, as far as the host has come. A CUDA graph does not move them.
        held: Epochs whose receive buffer is lent out.
        met: Of each parity, the last epoch in which ranks told each other counts.
        captured: Whether an exchange was captured in a CUDA graph, so that ``epochs`` may lag.
        trace: If a list, steps are appended to it, for the simulator to replay. Ranks that are
            threads may share one.
        pace: If set, called before each step; tests decide there who goes first.

    Raises:
        ValueError: On every rank, if ranks have different plans; if the heap is too small or has
            another number of ranks.
        RuntimeError: On a CPU without Triton's interpreter.
    """

    def __init__(
        self,
        plan: RowPlan,
        heap: SymmetricHeap,
        *,
        deadline: float = DEADLINE,
        layer: str = "",
        steps: ModuleType = protocol,
        agree: ModuleType = agree_kernels,
        carry: ModuleType = carry_kernels,
    ):
        _check_heap(plan, heap)
        self.plan, self.heap, self.deadline = plan, heap, deadline
        self.steps, self.agree, self.carry = steps, agree, carry
        self.interpreted = not isinstance(agree.signal_kernel, triton.JITFunction)
        if self.interpreted == heap.local.is_cuda:
            raise RuntimeError(
                "the row-wise kernels on CPU tensors run in Triton's interpreter, and on a GPU "
                "they do not: set TRITON_INTERPRET=1 for a CPU before moe_dispatch is imported, "
                "or use AllToAllDispatcher"
            )
        told = [data.decode() for data in heap.host_gather(repr(plan).encode())]
        if len(set(told)) > 1:
            other = next(rank for rank, one in enumerate(told) if one != told[0])
            raise ValueError(f"plans differ: rank 0 has {told[0]}, rank {other} has {told[other]}")
        device = heap.local.device
        self.state = torch.zeros(agree.STATE_SIZE.value, dtype=torch.int64, device=device)
        self.fields = plan.fields()
        self.views = {
            name: heap.local[field.at : field.at + field.num_bytes]
            .view(field.dtype)
            .view(field.shape)
            for name, field in self.fields.items()
        }
        self.epochs = dict.fromkeys(Clock, 0)
        self.held: list[int] = []
        self.captured = False
        self.met = [0, 0]
        self.layers, self.layer = [layer], layer
        self.trace: list[Event] | None = None
        self.pace: Callable[[int, Step], None] | None = None
        self.remote = Remote.of(self)
        self._pinned = (
            torch.zeros_like(self.state, device="cpu", pin_memory=True)
            if (device.type == "cuda")
            else self.state
        )
        self._noted = self._pinned.numpy()
        heap.local.zero_()
        heap.host_barrier()  # before anyone signals, nobody clears any more

    @property
    def world_size(self) -> int:
        """W."""
        return self.plan.world_size

    @property
    def rank(self) -> int:
        """This rank."""
        return self.heap.rank

    @property
    def direct(self) -> bool:
        """Whether rows go from tensor to tensor, since there is no other rank."""
        plan = self.plan
        return (
            plan.world_size == 1
            and not plan.dedup
            and plan.combine == "pull"
            and plan.wire == "plain"
        )

    def name_layer(self, layer: str) -> None:
        """Say whose exchanges come now, for errors to tell."""
        if layer not in self.layers:
            self.layers.append(layer)
        self.layer = layer

    def run(
        self,
        steps: Sequence[Step],
        clock: Clock,
        actions: Mapping[Op, Callable[[], None]] | None = None,
        back: int = 0,
    ) -> None:
        """Run steps in order.

        Args:
            steps: Of ``rowwise/protocol.py``.
            clock: Whose epoch they mean.
            actions: What each operation does that is neither clock, signal nor wait.
            back: How many epochs ago the exchange began that the steps belong to.
        """
        for step in steps:
            if self.pace is not None:
                self.pace(self.rank, step)
            lag = step.lag + back
            if step.op is Op.ADVANCE:
                self.epochs[clock] += 1
            if step.op is not Op.WAIT:  # what others can see is noted before they see it
                self._trace(step, clock, lag)
            if step.op is Op.ADVANCE:
                if not self.direct:  # no buffers, no parity
                    self.launch(
                        self.agree.advance_kernel, (1,), self.state, int(clock), num_warps=1
                    )
            elif step.op is Op.SIGNAL:
                self._signal(_kind(step), clock, lag)
            elif step.op is Op.WAIT:
                self._wait(_kind(step), clock, lag)
            elif actions is not None:
                actions[step.op]()
            if step.op is Op.WAIT:
                self._trace(step, clock, lag)

    def _trace(self, step: Step, clock: Clock, lag: int) -> None:
        if self.trace is not None:
            self.trace.append(Event(self.rank, step, clock, self.epochs[clock] - lag))

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch a kernel on the current stream."""
        interpreted_in_turn(kernel, grid, *args, **options)

    def at(self, name: str) -> int:
        """Return the offset of an array on the heap."""
        return self.fields[name].at

    def size(self, name: str) -> int:
        """Return the bytes of an array for one parity."""
        return self.fields[name].num_bytes // 2

    def of_epoch(self, name: str, clock: Clock) -> Tensor:
        """Return a copy of an array for the present epoch, which the device knows."""
        parity_1 = self.state[int(clock) : int(clock) + 1] & 1
        return self.views[name].index_select(0, parity_1)[0]

    def check(self) -> None:
        """Wait for the device, and raise if a rank was late or a call was refused.

        Raises:
            PeerError: If a rank did not come in time or gave up.
            ValueError: If a rank was given ids of no expert, or gradients are on for some only.
        """
        if self.state.is_cuda:
            self.note()
            torch.cuda.current_stream(self.state.device).synchronize()
        self._raise_noted()

    def note(self) -> None:
        """Raise what is known without waiting, and ask for news."""
        self._raise_noted()
        if self.state.is_cuda:
            size = self.agree.STATE_SIZE.value
            self.launch(
                self.agree.note_kernel, (1,), self.state, self._pinned, SIZE=size, num_warps=1
            )

    def abort(self) -> None:
        """Give up: every rank that waits for this one, now or ever, raises at once."""
        agree = self.agree
        self.launch(
            agree.abort_kernel, (self.world_size,), self.heap.bases_W, self.state,
            self.at("signals"), self.rank, W=self.world_size, KINDS=NUM_KINDS, num_warps=1,
        )  # fmt: skip
        if self.remote is not None:
            self.remote.abort()

    def close(self) -> None:
        """Free the memory. Collective."""
        self.views = {}
        self.heap.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the others must not wait for a rank that left, nor this one for them
            self.abort()

    def _signal(self, kind: Kind, clock: Clock, lag: int) -> None:
        if self.world_size == 1:  # the order of the stream is enough
            return
        self.launch(
            self.agree.signal_kernel, (self.world_size,), self.heap.bases_W, self.state,
            self.at("signals"), int(kind), self.rank, int(clock), lag,
            W=self.world_size, num_warps=1,
        )  # fmt: skip
        if self.remote is not None:
            self.remote.signal(int(kind), int(clock), lag)

    def _wait(self, kind: Kind, clock: Clock, lag: int) -> None:
        if self.world_size == 1:
            return
        if self.interpreted:
            self._wait_on_host(kind, self.epochs[clock] - lag)
        layer = self.layers.index(self.layer)
        self.launch(
            self.agree.wait_kernel, (self.world_size,), self.views["signals"], self.state,
            int(kind), int(clock), lag, layer, int(self.deadline * 1e9),
            W=self.world_size, TIMED=not self.interpreted, num_warps=1,
        )  # fmt: skip
        if self.interpreted and self._noted[self.agree.FAILED.value]:
            self.abort()
            self.check()
        if self.interpreted and self.state[clock].item() != self.epochs[clock]:
            self.abort()
            raise RuntimeError(
                f"rank {self.rank} counts epoch {self.epochs[clock]} on the host and "
                f"{self.state[clock].item()} on the device"
            )

    def _wait_on_host(self, kind: Kind, epoch: int) -> None:
        """Let go of the core while the interpreter would only spin."""
        signals_W = self.views["signals"][kind].numpy()
        end = time.monotonic() + self.deadline
        pause = 2e-5
        while (signals_W < epoch).any() and time.monotonic() < end:
            time.sleep(pause)
            pause = min(pause * 1.3, 2e-3)

    def _raise_noted(self) -> None:
        noted, agree = self._noted, self.agree
        failed = int(noted[agree.FAILED.value])
        if failed:
            raise self._peer_error(failed)
        refused = int(noted[agree.REFUSED.value])
        value = int(noted[agree.REFUSED_VALUE.value])
        if refused or value:  # a rank alone has counted its own bad ids, and that is all
            refused, rank = refused or 1, int(noted[agree.REFUSED_RANK.value])
            # Every rank refuses the same exchange and has gone through all of it: they stay in
            # step, and the next exchange is a new one.
            span = slice(agree.REFUSED.value, agree.REFUSED_VALUE.value + 1)
            self.state[span].zero_()
            noted[span] = 0
            if refused == 1:
                raise ValueError(
                    f"expert_TK must hold -1 (masked) or 0..{self.plan.num_experts - 1}: "
                    f"rank {rank} has {value} others"
                )
            here, there = ("off", "on") if value == 1 else ("on", "off")
            raise ValueError(
                f"gradients must be on or off (torch.no_grad) on all ranks: "
                f"they are {here} on rank {self.rank} and {there} on rank {rank}"
            )

    def _peer_error(self, failed: int) -> PeerError:
        noted, agree = self._noted, self.agree
        gave_up = failed == agree.ABORTED.value
        kind = Kind(0) if gave_up else Kind(failed - 1)
        source = -1 if gave_up else int(noted[agree.FAILED_SOURCE.value])
        epoch = int(noted[agree.FAILED_EPOCH.value])
        rows = ""
        half = protocol.parity(epoch)
        if kind is Kind.ROWS and not gave_up and self.met[half] == epoch:
            e = self.plan.e
            counts_M = self.views["counts"][half, source]
            expected = int(counts_M[self.rank * e : (self.rank + 1) * e].sum())
            rows = f"; it has {expected} rows for this rank"
        word = int(noted[agree.FAILED_SEEN.value])
        aborted = word >= agree.ABORTED.value
        blamed = word - agree.ABORTED.value - 1 if word > agree.ABORTED.value else source
        return PeerError(
            rank=self.rank,
            source=source if gave_up else blamed,
            phase="ABORTED" if gave_up else kind.name,
            layer=self.layers[int(noted[agree.FAILED_LAYER.value])],
            epoch=epoch,
            seen=-1 if aborted else word,
            num_late=int(noted[agree.NUM_LATE.value]),
            world_size=self.world_size,
            deadline=self.deadline,
            rows=rows,
            by=source if aborted else None,
        )


def _kind(step: Step) -> Kind:
    assert step.kind is not None, "signals and waits have a kind"
    return step.kind


def _check_heap(plan: RowPlan, heap: SymmetricHeap) -> None:
    if heap.world_size != plan.world_size:
        raise ValueError(
            f"W differs: the plan is for {plan.world_size} ranks, the heap has {heap.world_size}"
        )
    if heap.local.numel() < plan.heap_bytes:
        raise ValueError(
            f"the plan needs {plan.heap_bytes} bytes of symmetric memory, "
            f"the heap has {heap.local.numel()}"
        )
