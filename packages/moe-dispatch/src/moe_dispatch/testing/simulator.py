"""Many ranks under a scheduler that means harm: 64 of them fit into a test.

Each rank has a program of exchanges. It may run the end of an exchange, in which it reads what
came, later than what follows, as on a stream of its own; only what needs the result waits for it.
The scheduler decides who moves and what arrives: ranks may be slow, stores late, one may die.
"""

import random
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Literal, NamedTuple

import numpy as np

from moe_dispatch.rowwise import protocol
from moe_dispatch.rowwise.protocol import Clock, Op, Step
from moe_dispatch.testing.model import LawError, Model, Shape, Trip, plan_trip

Sort = Literal["dispatch", "combine", "send", "bring"]
Mood = Literal["fair", "late stores", "late reads", "slow rank", "fast rank"]
MOODS: tuple[Mood, ...] = ("fair", "late stores", "late reads", "slow rank", "fast rank")
READS = {Op.TAKE_ROWS, Op.PULL_RESULTS, Op.SUM_RESULTS}


class Exchange(NamedTuple):
    """One exchange in the program of every rank.

    Attributes:
        sort: ``"dispatch"``, ``"combine"``, ``"send"`` or ``"bring"`` (backward).
        layer: Which dispatch it belongs to, from 0.
        needs: Exchanges, by their place in the program, whose results it needs.
    """

    sort: Sort
    layer: int
    needs: tuple[int, ...] = ()


class Outcome(NamedTuple):
    """What became of a run.

    Attributes:
        finished: Ranks that went through their program.
        blocked: For each other rank that lives: the step in which it waits, and for whom.
        moves: Steps and arrivals.
    """

    finished: list[int]
    blocked: dict[int, tuple[Step, list[int]]]
    moves: int


def interleaved(num_layers: int, backward: bool = True, depth: int = 3) -> list[Exchange]:
    """Return a program with several dispatches under way at any time, forward, then backward.

    Examples:
        >>> [f"{one.sort} {one.layer}" for one in interleaved(3, backward=False, depth=2)]
        ['dispatch 0', 'dispatch 1', 'combine 0', 'dispatch 2', 'combine 1', 'combine 2']
    """
    program = _passes("dispatch", "combine", range(num_layers), depth, 0)
    if backward:
        start = len(program)
        program += _passes("send", "bring", range(num_layers)[::-1], depth, start)
    return program


def _passes(first: Sort, second: Sort, layers: range, depth: int, start: int) -> list[Exchange]:
    """Return one pass through the layers; what comes first is ``depth`` ahead of what follows."""
    program: list[Exchange] = []
    made: dict[int, int] = {}
    for turn in range(len(layers) + depth - 1):
        if turn < len(layers):
            made[layers[turn]] = start + len(program)
            program.append(Exchange(first, layers[turn]))
        if turn >= depth - 1:
            ended = layers[turn - depth + 1]
            program.append(Exchange(second, ended, (made[ended],)))
    return program


class _Runner:
    """Where one rank is: in its program, and in the ends of exchanges that it put off."""

    def __init__(self) -> None:
        self.next = 0
        self.main: deque[Step] = deque()
        self.ends: deque[tuple[int, Clock, int, deque[Step]]] = deque()
        self.done: set[int] = set()


class Simulator:
    """Runs a program on all ranks.

    Args:
        shape: Sizes.
        program: What every rank does.
        seed: Of routing and schedule.
        mood: Of the scheduler.
        steps: The protocol, maybe with a fault.
        hot: Experts that get all rows; all of them if None.
        masked: Share of masked routes.
    """

    def __init__(
        self,
        shape: Shape,
        program: list[Exchange],
        seed: int,
        mood: Mood = "fair",
        steps: ModuleType = protocol,
        hot: int | None = None,
        masked: float = 0.1,
    ):
        self.shape, self.program, self.mood, self.steps = shape, program, mood, steps
        self.chance = random.Random(seed)
        self.trips, self.epoch_of_layer = _trips(shape, program, seed, hot, masked)
        self.model = Model(shape, self.trips, steps)
        self.runners = [_Runner() for _ in range(shape.world_size)]
        self.odd = self.chance.randrange(shape.world_size)
        self.idle: set[int] = set()

    def run(self, dies: int | None = None, after: int = 0) -> Outcome:
        """Run until all ranks are done, or nobody can move.

        Args:
            dies: A rank that takes no further step after some.
            after: How many it takes.

        Raises:
            LawError: If a law is broken, or ranks that all live wait for each other for ever.
        """
        moves, taken, everyone = 0, 0, range(self.shape.world_size)
        while True:
            able = [r for r in everyone if r != dies or taken < after]
            moved = self._move(able)
            if moved is None:
                break
            moves += 1
            taken += moved == dies
        finished = [r for r in able if self._finished(r)]
        blocked = {r: self._why(r) for r in able if not self._finished(r)}
        if blocked and dies is None:
            raise LawError(f"ranks wait for ever: {blocked}")
        return Outcome(finished, blocked, moves)

    def _move(self, able: list[int]) -> int | None:
        """Move one rank or deliver something. Return who moved, -1 for an arrival, or None."""
        late_stores = self.mood == "late stores"
        if not late_stores and self.chance.random() < 0.6 and self._deliver():
            return -1
        self.idle -= self.model.woken
        self.model.woken.clear()
        while awake := [r for r in able if r not in self.idle]:
            rank = self._pick(awake)
            if any(turn(rank) for turn in self._turns(rank)):
                return rank
            self.idle.add(rank)  # until a signal comes to it
        if self._deliver():
            return -1
        # Only now does a rank that puts its reads off read.
        return next((r for r in able if self._end(r) or self._main(r)), None)

    def _pick(self, awake: list[int]) -> int:
        if self.mood in {"slow rank", "fast rank"} and self.odd in awake:
            if self.mood == "fast rank" or len(awake) == 1:
                return self.odd
            awake = [rank for rank in awake if rank != self.odd]
        return self.chance.choice(awake)

    def _turns(self, rank: int) -> list[Callable[[int], bool]]:
        if self.mood == "late reads" and rank == self.odd:
            return [self._main]
        turns: list[Callable[[int], bool]] = [self._end, self._main]
        return turns if self.chance.random() < 0.5 else turns[::-1]

    def _deliver(self) -> bool:
        start = self.chance.randrange(len(self.model.boxes))
        boxes = self.model.boxes[start:] + self.model.boxes[:start]
        return any(box.deliver_any(self.chance) for box in boxes if len(box))

    def _main(self, rank: int) -> bool:
        runner = self.runners[rank]
        if not runner.main and not self._begin(rank):
            return False
        step = runner.main[0]
        exchange = self.program[runner.next - 1]
        clock, trip = _clock(exchange), self.epoch_of_layer[exchange.layer]
        if step.op is Op.WAIT and self.model.late(rank, step, clock):
            return False
        runner.main.popleft()
        self.model.take_step(rank, step, clock, trip)
        if step.op is not Op.ADVANCE and runner.main and runner.main[0].op in READS:
            epoch = self.model.ranks[rank].epochs[clock]
            runner.ends.append((runner.next - 1, clock, epoch, runner.main))
            runner.main = deque()
        return True

    def _begin(self, rank: int) -> bool:
        runner = self.runners[rank]
        if runner.next == len(self.program):
            return False
        exchange = self.program[runner.next]
        if not runner.done.issuperset(exchange.needs):
            return False
        runner.main = deque(self._steps(exchange))
        runner.next += 1
        return True

    def _end(self, rank: int) -> bool:
        """Go on with the end of the oldest exchange that was put off."""
        runner = self.runners[rank]
        if not runner.ends:
            return False
        number, clock, epoch, steps = runner.ends[0]
        trip = self.epoch_of_layer[self.program[number].layer]
        self.model.take_step(rank, steps.popleft(), clock, trip, epoch)
        if not steps:
            runner.ends.popleft()
            runner.done.add(number)
        return True

    def _steps(self, exchange: Exchange) -> tuple[Step, ...]:
        steps = self.steps
        if exchange.sort in {"combine", "bring"}:
            return steps.PUSH if self.shape.push else steps.PULL
        meet = steps.MEET if exchange.sort == "dispatch" else steps.MEET_AGAIN
        return (*meet, *steps.PUT, *steps.TAKE, *steps.FREE_ROWS)

    def _finished(self, rank: int) -> bool:
        runner = self.runners[rank]
        return runner.next == len(self.program) and not runner.main and not runner.ends

    def _why(self, rank: int) -> tuple[Step, list[int]]:
        runner = self.runners[rank]
        if not runner.main:
            raise LawError(f"rank {rank} cannot begin exchange {runner.next}")
        step = runner.main[0]
        return step, self.model.late(rank, step, _clock(self.program[runner.next - 1]))


def _clock(exchange: Exchange) -> Clock:
    return Clock.PUTS if exchange.sort in {"dispatch", "send"} else Clock.RETURNS


def _trips(
    shape: Shape, program: list[Exchange], seed: int, hot: int | None, masked: float
) -> tuple[dict[int, Trip], dict[int, int]]:
    """Draw the routing of each dispatch; return it by epoch, and the epoch of each layer."""
    generator = np.random.default_rng(seed)
    trips, epoch_of_layer, epoch = {}, {}, 0
    for exchange in program:
        epoch += _clock(exchange) is Clock.PUTS
        if exchange.sort != "dispatch":
            continue
        experts = [
            _draw(generator, tokens, shape, hot or shape.num_experts, masked)
            for tokens in shape.tokens_W
        ]
        trips[epoch] = plan_trip(shape, experts)
        epoch_of_layer[exchange.layer] = epoch
    return trips, epoch_of_layer


def _draw(
    generator: np.random.Generator, tokens: int, shape: Shape, hot: int, masked: float
) -> np.ndarray:
    score_TE = generator.random((tokens, max(hot, shape.top_k)))
    expert_TK = np.argsort(score_TE, axis=1)[:, : shape.top_k]
    return np.where(generator.random(expert_TK.shape) < masked, -1, expert_TK)
