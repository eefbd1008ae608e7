"""Known ways to get the exchange wrong, as changes of its source: the laws must find each.

A fault in ``rowwise/protocol.py`` is tried in the simulator, one in a kernel on virtual ranks in
the interpreter. ``hunt`` tries either, and says what it found.
"""

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from moe_dispatch.rowwise import protocol
from moe_dispatch.rowwise.agree import kernel as agree
from moe_dispatch.rowwise.carry import kernel as carry
from moe_dispatch.rowwise.protocol import Kind, Op, Step
from moe_dispatch.testing.model import LawError, Shape
from moe_dispatch.testing.simulator import MOODS, Simulator, interleaved

Where = Literal["steps", "agree", "carry"]
MODULES: dict[Where, ModuleType] = {"steps": protocol, "agree": agree, "carry": carry}


class Fault(NamedTuple):
    """One change of one module.

    Attributes:
        name: What to call it.
        where: Which module.
        old: Text that occurs exactly once in it.
        new: What takes its place.
        options: Fields of ``RowPlan`` with which a fault in a kernel shows.
    """

    name: str
    where: Where
    old: str
    new: str
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed


def _drop(name: str, line: str) -> Fault:
    return Fault(name, "steps", f"    {line},\n", "")


def _swap(name: str, first: str, second: str) -> Fault:
    old = f"    {first},\n    {second},\n"
    return Fault(name, "steps", old, f"    {second},\n    {first},\n")


FAULTS = [
    _drop("counts are not signalled", "Step(Op.SIGNAL, Kind.COUNTS)"),
    _drop("counts are not waited for", "Step(Op.WAIT, Kind.COUNTS)"),
    _swap(
        "counts are signalled before told",
        "Step(Op.TELL_COUNTS)", "Step(Op.SIGNAL, Kind.COUNTS)",
    ),
    _drop("rows are not signalled", "Step(Op.SIGNAL, Kind.ROWS)"),
    _drop("rows are not waited for", "Step(Op.WAIT, Kind.ROWS)"),
    _swap("rows are signalled before put", "Step(Op.PUT_ROWS)", "Step(Op.SIGNAL, Kind.ROWS)"),
    Fault(
        "rows of the epoch before are waited for", "steps",
        "Step(Op.WAIT, Kind.ROWS)", "Step(Op.WAIT, Kind.ROWS, lag=1)",
    ),
    Fault(
        "rows are stored one credit too early", "steps",
        "Step(Op.WAIT, Kind.ROWS_FREE, lag=2),\n    Step(Op.TELL_COUNTS)",
        "Step(Op.WAIT, Kind.ROWS_FREE, lag=3),\n    Step(Op.TELL_COUNTS)",
    ),
    Fault(
        "rows are stored without credit", "steps",
        "    Step(Op.WAIT, Kind.ROWS_FREE, lag=2),\n    Step(Op.TELL_COUNTS)",
        "    Step(Op.TELL_COUNTS)",
    ),
    Fault(
        "gradients are stored one credit too early", "steps",
        "Step(Op.WAIT, Kind.ROWS_FREE, lag=2),\n)", "Step(Op.WAIT, Kind.ROWS_FREE, lag=3),\n)",
    ),
    Fault(
        "a buffer is given back before it was read", "steps",
        "TAKE = (Step(Op.TAKE_ROWS),)",
        "TAKE = (Step(Op.SIGNAL, Kind.ROWS_FREE), Step(Op.TAKE_ROWS))",
    ),
    Fault(
        "a buffer is never given back", "steps",
        "FREE_ROWS = (Step(Op.SIGNAL, Kind.ROWS_FREE),)", "FREE_ROWS = ()",
    ),
    Fault(
        "results are laid out one credit too early", "steps",
        "lag=2),\n    Step(Op.GIVE_RESULTS)", "lag=3),\n    Step(Op.GIVE_RESULTS)",
    ),
    Fault(
        "results are signalled before laid out", "steps",
        "    Step(Op.GIVE_RESULTS),\n    Step(Op.SIGNAL, Kind.RESULTS),\n",
        "    Step(Op.SIGNAL, Kind.RESULTS),\n    Step(Op.GIVE_RESULTS),\n",
    ),
    Fault(
        "results are pulled before they are there", "steps",
        "    Step(Op.WAIT, Kind.RESULTS),\n    Step(Op.PULL_RESULTS),\n",
        "    Step(Op.PULL_RESULTS),\n",
    ),
    Fault(
        "results are given back before pulled", "steps",
        "    Step(Op.PULL_RESULTS),\n    Step(Op.SIGNAL, Kind.RESULTS_FREE),\n",
        "    Step(Op.SIGNAL, Kind.RESULTS_FREE),\n    Step(Op.PULL_RESULTS),\n",
    ),
    Fault(
        "results are never given back", "steps",
        "    Step(Op.PULL_RESULTS),\n    Step(Op.SIGNAL, Kind.RESULTS_FREE),\n",
        "    Step(Op.PULL_RESULTS),\n",
    ),
    Fault(
        "results are pushed one credit too early", "steps",
        "lag=2),\n    Step(Op.PUSH_RESULTS)", "lag=3),\n    Step(Op.PUSH_RESULTS)",
    ),
    Fault(
        "pushed results are summed before they are there", "steps",
        "    Step(Op.WAIT, Kind.RESULTS),\n    Step(Op.SUM_RESULTS),\n",
        "    Step(Op.SUM_RESULTS),\n",
    ),
    Fault("there is one buffer, not two", "steps", "return epoch & 1", "return epoch & 0"),
    Fault(
        "a signal goes into the slot of another rank", "agree",
        "+ kind * W + me\n        tl.debug", "+ kind * W + d\n        tl.debug",
    ),
    Fault(
        "a clock stands still", "agree",
        "tl.store(state_ptr + clock, tl.load(state_ptr + clock) + 1)",
        "tl.store(state_ptr + clock, tl.load(state_ptr + clock) + (clock + 1) % 2)",
    ),
    Fault(
        "a source's rows begin where the next one's do", "agree",
        "before = tl.cumsum(kept, axis=0) - kept", "before = tl.cumsum(kept, axis=0)",
    ),
    Fault(
        "an expert's rows begin where the next one's do", "agree",
        "begin = tl.cumsum(of_expert, axis=0) - of_expert",
        "begin = tl.cumsum(of_expert, axis=0)",
    ),
    Fault(
        "tokens that travel once begin at the wrong source", "agree",
        "tl.sum(tl.where(w < me, tokens, 0), axis=0)",
        "tl.sum(tl.where(w < me + 1, tokens, 0), axis=0)",
        {"dedup": True},
    ),
    Fault(
        "rows go into the buffer of the other epoch", "carry",
        "at = base + rows_at + parity * rows_size",
        "at = base + rows_at + (1 - parity) * rows_size",
    ),
    Fault(
        "rows past the last are what lay there", "carry",
        "    width = tl.where(r < count, N, 0)\n", "    width = tl.where(r < count, N, N)\n",
    ),
    Fault(
        "the last block of a row is not sent", "carry",
        "tl.store(target + n, row, mask=n < width, cache_modifier=CACHE)",
        "tl.store(target + n, row, mask=n < width - 1, cache_modifier=CACHE)",
    ),
    Fault(
        "a token stands for rows of another rank", "carry",
        "told = tl.where(ranks == d, rows, -1)", "told = rows", {"dedup": True},
    ),
    Fault(
        "the gradient of a weight is that of the first route", "carry",
        "place = place * K + k", "place = place * K", {"dedup": True},
    ),
    Fault(
        "results are pushed to the first rank", "carry",
        "tl.store(meta + place, origin + slot)", "tl.store(meta + place, slot)",
        {"combine": "push"},
    ),
    Fault(
        "gradients are not weighted", "carry",
        "            row = narrow(row.to(ACC) * weight, row.dtype)\n", "            row = row\n",
    ),
]  # fmt: skip


def plant(fault: Fault) -> str:
    """Return the changed source.

    Raises:
        ValueError: If the old text does not occur exactly once.
    """
    text = Path(str(MODULES[fault.where].__file__)).read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: the old text occurs {text.count(fault.old)} times")
    return text.replace(fault.old, fault.new)


@contextmanager
def planted(fault: Fault) -> Iterator[ModuleType]:
    """Give the changed module, beside the one that is in use."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(plant(fault), encoding="utf-8")  # Triton reads kernels from their file
        spec = importlib.util.spec_from_file_location("faulty", path)
        assert spec is not None, "a file has a spec"
        assert spec.loader is not None, "a file has a loader"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if fault.where == "steps":
            _as_ours(module)
        yield module


def simulate(steps: ModuleType = protocol, seeds: int = 3) -> None:
    """Run small simulations in every mood, pulled and pushed.

    Raises:
        LawError: If a law is broken.
    """
    for seed, mood, push in product(range(seeds), MOODS, (False, True)):
        tokens = tuple((seed + 3 * w) % 4 for w in range(4))
        shape = Shape(4, 2, 2, tokens, capacity=4 * 3 * 2, push=push)
        Simulator(shape, interleaved(5), seed, mood, steps).run()


def hunt(fault: Fault, run: Any) -> str:
    """Return what the laws say of a fault, "" if they find nothing.

    Args:
        fault: What to plant.
        run: Called with a kernel module by its name and ``options``; must raise if a law breaks.
    """
    with planted(fault) as module:
        try:
            if fault.where == "steps":
                simulate(module)
            else:
                run({fault.where: module}, fault.options)
        except (LawError, AssertionError, RuntimeError, ValueError) as error:
            return str(error)
    return ""


def _as_ours(module: ModuleType) -> None:
    """Say the steps of a copy in the words of the original, whose enumerations are compared."""
    for name in ("MEET", "MEET_AGAIN", "PUT", "TAKE", "FREE_ROWS", "PULL", "PUSH"):
        steps = [
            Step(Op(step.op), None if step.kind is None else Kind(step.kind), step.lag)
            for step in getattr(module, name)
        ]
        setattr(module, name, tuple(steps))
