"""The protocol on simulated ranks: who may do what when, and what must never be seen.

The steps are those of ``rowwise/protocol.py`` itself. What the kernels do in each step is said
here once more, in numpy and without values: a row is a tag that says which token of which rank it
is, and of which epoch. Laws are checked at each read and each store:

* counts, rows and results are read only after they have come, and those of this epoch;
* no store lands in a buffer that its reader is not done with;
* rows lie in the order (expert, source, token, k), each exactly once, inside of the buffer.
"""

from types import ModuleType
from typing import NamedTuple

import numpy as np

from moe_dispatch.rowwise import protocol
from moe_dispatch.rowwise.protocol import Clock, Kind, Op, Step
from moe_dispatch.testing.network import Outbox


class LawError(AssertionError):
    """A law of the exchange was broken."""


class Shape(NamedTuple):
    """Sizes of a simulated exchange.

    Attributes:
        world_size: W.
        experts_per_rank: e.
        top_k: K.
        tokens_W: T of each rank.
        capacity: Rows of a receive buffer.
        push: Whether results are pushed.
    """

    world_size: int
    experts_per_rank: int
    top_k: int
    tokens_W: tuple[int, ...]
    capacity: int
    push: bool = False

    @property
    def num_experts(self) -> int:
        """E."""
        return self.world_size * self.experts_per_rank


class Places(NamedTuple):
    """Where the routes of one rank go.

    Attributes:
        rank_N: Rank of each route that is not masked, in the order of the slots.
        row_N: Row there.
        slot_N: Slot here.
    """

    rank_N: np.ndarray
    row_N: np.ndarray
    slot_N: np.ndarray


class Trip(NamedTuple):
    """What ranks dispatch in one epoch, and where it must go.

    Attributes:
        counts_WE: Rows that each source has for each expert.
        places_W: Of each source.
        tags_W: What must lie in the buffer of each rank: source and slot of each row.
    """

    counts_WE: np.ndarray
    places_W: list[Places]
    tags_W: list[np.ndarray]


def plan_trip(shape: Shape, expert_W: list[np.ndarray]) -> Trip:
    """Sort all routes of all ranks at once by (expert, source, slot): what each must find alone."""
    W, E, e = shape.world_size, shape.num_experts, shape.experts_per_rank
    counts_WE = np.stack([np.bincount(x[x >= 0], minlength=E) for x in expert_W])
    flat = [x.reshape(-1) for x in expert_W]
    source_N = np.concatenate([np.full(len(x), w) for w, x in enumerate(flat)])
    slot_N = np.concatenate([np.arange(len(x)) for x in flat])
    expert_N = np.concatenate(flat)
    order = np.lexsort((slot_N, source_N, expert_N))
    order = order[expert_N[order] >= 0]
    rank_M = expert_N[order] // e
    row_M = np.arange(len(order)) - np.searchsorted(rank_M, rank_M)
    tags_W = [
        source_N[order[rank_M == d]] * (1 << 20) + slot_N[order[rank_M == d]] for d in range(W)
    ]
    places_W = []
    for w in range(W):
        mine = source_N[order] == w
        by_slot = np.argsort(slot_N[order[mine]])
        places_W.append(
            Places(rank_M[mine][by_slot], row_M[mine][by_slot], slot_N[order[mine]][by_slot])
        )
    return Trip(counts_WE, places_W, tags_W)


class Rank:
    """Memory, clocks and notes of one rank.

    Attributes:
        rank: Its number.
        signals_KW: By kind and source.
        counts: Of each parity: epoch and counts by source.
        rows: Of each parity: epoch and tag by row.
        results: Of each parity: epoch and tag, by row (pulled) or slot (pushed).
        epochs: Its clocks.
        rows_done: The last epoch of rows that it has taken.
        results_done: The last epoch of results that it has fetched.
        places: By epoch, as it found them.
    """

    def __init__(self, shape: Shape, rank: int):
        W, slots = shape.world_size, max(shape.tokens_W) * shape.top_k
        self.rank = rank
        self.signals_KW = np.zeros((len(Kind), W), dtype=np.int64)
        self.counts_epoch = np.zeros((2, W), dtype=np.int64)
        self.counts = np.zeros((2, W, shape.num_experts), dtype=np.int64)
        self.rows_epoch = np.zeros((2, shape.capacity), dtype=np.int64)
        self.rows = np.zeros((2, shape.capacity), dtype=np.int64)
        size = slots if shape.push else shape.capacity
        self.results_epoch = np.zeros((2, size), dtype=np.int64)
        self.results = np.zeros((2, size), dtype=np.int64)
        self.epochs = dict.fromkeys(Clock, 0)
        self.rows_done = self.results_done = 0
        self.places: dict[int, Places] = {}


class Model:
    """All ranks.

    Args:
        shape: The sizes.
        trips: What is dispatched, by the epoch of the dispatch.
        steps: The protocol; a test gives one with a fault in it.
    """

    def __init__(self, shape: Shape, trips: dict[int, Trip], steps: ModuleType = protocol):
        self.shape, self.trips, self.steps = shape, trips, steps
        self.ranks = [Rank(shape, rank) for rank in range(shape.world_size)]
        self.woken: set[int] = set()  # to whom signals have come
        self.boxes = [Outbox(shape.world_size) for _ in range(shape.world_size)]

    def late(self, rank: int, step: Step, clock: Clock) -> list[int]:
        """Return the ranks that a wait would wait for now."""
        me = self.ranks[rank]
        epoch = me.epochs[clock] - step.lag
        assert step.kind is not None, "waits have a kind"
        return np.flatnonzero(me.signals_KW[step.kind] < epoch).tolist()

    def take_step(self, rank: int, step: Step, clock: Clock, trip: int, epoch: int = 0) -> None:
        """Let a rank take a step, which must not be a wait that is not over.

        Args:
            rank: Who.
            step: What.
            clock: Of the exchange.
            trip: The epoch of the dispatch to which the exchange belongs.
            epoch: Of the exchange, if its clock has gone on since.
        """
        me = self.ranks[rank]
        epoch = epoch or me.epochs[clock]
        if step.op is Op.ADVANCE:
            me.epochs[clock] += 1
        elif step.op is Op.WAIT:
            if late := self.late(rank, step, clock):
                raise LawError(f"rank {rank} goes on without {late} in {step}")
        elif step.op is Op.SIGNAL:
            self._signal(me, step, epoch)
        else:
            getattr(self, f"_{step.op.name.lower()}")(me, epoch, trip or epoch)

    def _signal(self, me: Rank, step: Step, epoch: int) -> None:
        kind, value = step.kind, epoch - step.lag
        assert kind is not None, "signals have a kind"
        for d, other in enumerate(self.ranks):

            def land(other: Rank = other) -> None:
                other.signals_KW[kind, me.rank] = value
                self.woken.add(other.rank)

            self.boxes[me.rank].signal(d, land)

    def _tell_counts(self, me: Rank, epoch: int, trip: int) -> None:
        del trip
        half, told_E = self.steps.parity(epoch), self.trips[epoch].counts_WE[me.rank]
        for other in self.ranks:

            def land(other: Rank = other) -> None:
                other.counts_epoch[half, me.rank] = epoch
                other.counts[half, me.rank] = told_E

            self.boxes[me.rank].store(land)

    def _plan(self, me: Rank, epoch: int, trip: int) -> None:
        """Find places from the counts in memory, as each rank does for itself."""
        del trip
        half, e = self.steps.parity(epoch), self.shape.experts_per_rank
        stale = np.flatnonzero(me.counts_epoch[half] != epoch).tolist()
        if stale:
            raise LawError(f"rank {me.rank} reads counts of {stale} that are not of {epoch}")
        count_WE = me.counts[half]
        of_rank = count_WE.sum(0).reshape(-1, e)
        begin_E = (of_rank.cumsum(1) - of_rank).reshape(-1)
        first_E = begin_E + count_WE[: me.rank].sum(0)
        known = self.trips[epoch].places_W[me.rank]
        rank_N, row_N = [], []
        seen_E = np.zeros(self.shape.num_experts, dtype=np.int64)
        for expert in self._experts(me, epoch):
            rank_N.append(expert // e)
            row_N.append(first_E[expert] + seen_E[expert])
            seen_E[expert] += 1
        found = Places(np.array(rank_N, int), np.array(row_N, int), known.slot_N)
        for one, other in zip(found, known, strict=True):
            if not np.array_equal(one, other):
                raise LawError(f"rank {me.rank} finds other places in epoch {epoch}")
        me.places[epoch] = found

    def _experts(self, me: Rank, epoch: int) -> np.ndarray:
        """Return the experts of this rank's routes, in the order of the slots."""
        trip = self.trips[epoch]
        places = trip.places_W[me.rank]
        e = self.shape.experts_per_rank
        ends_WE = trip.counts_WE.sum(0).reshape(-1, e).cumsum(1)
        local = [
            np.searchsorted(ends_WE[d], r, side="right")
            for d, r in zip(places.rank_N, places.row_N, strict=True)
        ]
        return places.rank_N * e + np.array(local, int)

    def _put_rows(self, me: Rank, epoch: int, trip: int) -> None:
        half, places = self.steps.parity(epoch), me.places[trip]
        for d in np.unique(places.rank_N):
            other, there = self.ranks[d], places.rank_N == d
            for part in np.array_split(np.flatnonzero(there), 2):  # may arrive apart
                row_P, tag_P = places.row_N[part], (me.rank << 20) + places.slot_N[part]

                def land(
                    other: Rank = other, row_P: np.ndarray = row_P, tag_P: np.ndarray = tag_P
                ) -> None:
                    if other.rows_done < epoch - 2:
                        raise LawError(
                            f"rank {me.rank} stores rows of {epoch} at rank {other.rank}, which "
                            f"has taken those of {other.rows_done}"
                        )
                    if len(row_P) and row_P.max() >= self.shape.capacity:
                        raise LawError(f"rank {me.rank} stores past the buffer")
                    other.rows_epoch[half, row_P] = epoch
                    other.rows[half, row_P] = tag_P

                self.boxes[me.rank].store(land)

    def _take_rows(self, me: Rank, epoch: int, trip: int) -> None:
        half, want_R = self.steps.parity(epoch), self.trips[trip].tags_W[me.rank]
        R = len(want_R)
        if (me.rows_epoch[half, :R] != epoch).any():
            raise LawError(f"rank {me.rank} takes rows that are not of epoch {epoch}")
        if not np.array_equal(me.rows[half, :R], want_R):
            raise LawError(f"rank {me.rank} takes other rows in epoch {epoch}")
        me.rows_done = max(me.rows_done, epoch)

    def _give_results(self, me: Rank, epoch: int, trip: int) -> None:
        """Lay results out in this rank's own memory, where others see them when they arrive."""
        half, tag_R = self.steps.parity(epoch), self.trips[trip].tags_W[me.rank]

        def land() -> None:
            behind = [r.rank for r in self.ranks if r.results_done < epoch - 2]
            if behind:
                raise LawError(f"rank {me.rank} lays out {epoch}, {behind} still read the last")
            me.results_epoch[half, : len(tag_R)] = epoch
            me.results[half, : len(tag_R)] = tag_R

        self.boxes[me.rank].store(land)

    def _pull_results(self, me: Rank, epoch: int, trip: int) -> None:
        half, places = self.steps.parity(epoch), me.places[trip]
        for d, row, slot in zip(*places, strict=True):
            other = self.ranks[d]
            if other.results_epoch[half, row] != epoch:
                raise LawError(f"rank {me.rank} pulls a result of {d} that is not of {epoch}")
            if other.results[half, row] != (me.rank << 20) + slot:
                raise LawError(f"rank {me.rank} pulls another result from {d}")
        me.results_done = max(me.results_done, epoch)

    def _push_results(self, me: Rank, epoch: int, trip: int) -> None:
        half, tag_R = self.steps.parity(epoch), self.trips[trip].tags_W[me.rank]
        for d in np.unique(tag_R >> 20):
            other, slot_P = self.ranks[d], tag_R[tag_R >> 20 == d] & ((1 << 20) - 1)

            def land(other: Rank = other, slot_P: np.ndarray = slot_P) -> None:
                if other.results_done < epoch - 2:
                    raise LawError(f"rank {me.rank} pushes {epoch} at {other.rank} too early")
                other.results_epoch[half, slot_P] = epoch
                other.results[half, slot_P] = me.rank

            self.boxes[me.rank].store(land)

    def _sum_results(self, me: Rank, epoch: int, trip: int) -> None:
        half, places = self.steps.parity(epoch), me.places[trip]
        if (me.results_epoch[half, places.slot_N] != epoch).any():
            raise LawError(f"rank {me.rank} sums results that are not of epoch {epoch}")
        if not np.array_equal(me.results[half, places.slot_N], places.rank_N):
            raise LawError(f"rank {me.rank} sums results of other ranks")
        me.results_done = max(me.results_done, epoch)
