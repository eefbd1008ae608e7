"""What a run directory holds, as arrays."""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_train.metrics import Record, read_metrics

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """One run, read once.

    Attributes:
        name: Name of the run directory.
        train: Records of training steps, by step.
        evals: Records of evaluations, by step.
        starts: Records of the starts of processes: the first, and one for each resume.
        references: Losses to compare with, in nats a byte, by name.
        config: The text of the configuration.
        sample: Generated text, or None.
        environment: What the run ran on.
        result: What the run ended with.
    """

    name: str
    train: Sequence[Record]
    evals: Sequence[Record]
    starts: Sequence[Record]
    references: dict[str, float]
    config: str
    sample: str | None
    environment: dict[str, Any]
    result: dict[str, Any]

    def column(self, key: str) -> Array:
        """Return one number of every training record; NaN where it is absent or is not one."""
        return _numbers([record.get(key) for record in self.train])

    def steps(self) -> Array:
        return self.column("step")

    @property
    def unit(self) -> str:
        """What losses are measured in; a token is a byte unless a validation says otherwise."""
        both = [(r.get("loss"), r.get("nats_per_byte", r.get("loss"))) for r in self.evals]
        return "nats a token" if any(a != b and a == a for a, b in both) else "nats a byte"  # noqa: PLR0124

    def eval_points(self) -> tuple[Array, Array]:
        """Return the steps and the losses of the evaluations."""
        steps = _numbers([record["step"] for record in self.evals])
        return steps, _numbers([record.get("loss") for record in self.evals])

    def per_layer(self, key: str, buckets: int) -> tuple[Array, Array]:
        """Average a list per layer over runs of consecutive records.

        Args:
            key: Such as ``entropy`` (a number per layer) or ``load`` (a list per layer).
            buckets: The largest number of averages.

        Returns:
            The first step of each bucket [B], and the averages [B, layers, ...]. Records of
            another shape than the last one's are left out.
        """
        if key not in self._stacks:
            self._stacks[key] = _stack(self.train, key)
        steps, values = self._stacks[key]
        if len(steps) == 0:
            return steps, np.zeros((0, 0))
        pieces = np.array_split(np.arange(len(steps)), min(buckets, len(steps)))
        with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are answers here
            means = [values[piece].mean(axis=0) for piece in pieces]
        return np.array([steps[piece[0]] for piece in pieces]), np.array(means)

    @functools.cached_property
    def _stacks(self) -> dict[str, tuple[Array, Array]]:
        return {}

    def labels(self) -> list[str]:
        """Return what records say of themselves, such as that experts were forced, once each."""
        records = [*self.starts, *self.train, *self.evals]
        lists = [r["labels"] for r in records if isinstance(r.get("labels"), list)]
        return list(dict.fromkeys(str(label) for found in lists for label in found))

    def alarms(self) -> list[str]:
        """Return each alarm once: how often it rang, from and to which step, and its last words."""
        rung: dict[str, list[tuple[int, str]]] = {}
        for record in self.train:
            found = record.get("alarms")
            for line in found if isinstance(found, list) else []:
                rung.setdefault(str(line).partition(":")[0], []).append((record["step"], str(line)))
        return [
            f"{times[-1][1]} ({len(times)} records, from step {times[0][0]} to {times[-1][0]})"
            for _, times in sorted(rung.items())
        ]


def _stack(records: Sequence[Record], key: str) -> tuple[Array, Array]:
    """Return the steps, and the values [N, ...] of the records that are shaped as the last is."""
    rows = [(record["step"], _array(record.get(key))) for record in records]
    rows = [(step, value) for step, value in rows if value is not None and value.size]
    kept = [(step, value) for step, value in rows if value.shape == rows[-1][1].shape]
    return np.array([step for step, _ in kept], dtype=float), np.array([v for _, v in kept])


def read_run(directory: Path) -> RunData:
    """Read a run directory; all files but ``config.toml`` and ``metrics.jsonl`` are optional.

    Raises:
        FileNotFoundError: If one of those two is missing.
        ValueError: If a file cannot be understood; the message names it.
    """
    records = sorted(read_metrics(directory / "metrics.jsonl"), key=lambda record: record["step"])
    kinds = {kind: [r for r in records if r["kind"] == kind] for kind in ("train", "eval", "run")}
    references = _read_json(directory / "references.json")
    sample = directory / "sample.txt"
    return RunData(
        name=directory.resolve().name,
        train=kinds["train"],
        evals=kinds["eval"],
        starts=kinds["run"],
        references={name: float(value) for name, value in references.items()},
        config=_read_text(directory / "config.toml"),
        sample=_read_text(sample) if sample.exists() else None,
        environment=_read_json(directory / "environment.json"),
        result=_read_json(directory / "result.json"),
    )


def smooth(values: Array, span: float) -> Array:
    """Average over both sides with weights that fall by e in ``span`` values.

    NaN counts as absent and so do infinities. Both sides weigh the same, so a falling line is
    not drawn late.

    Examples:
        >>> smooth(np.array([2.0, np.nan, 2.0]), 5.0)
        array([2., 2., 2.])
    """
    known = np.isfinite(values)
    total = _sum_both_sides(np.where(known, values, 0.0), span)
    weight = _sum_both_sides(known.astype(float), span)
    return np.divide(total, weight, out=np.full(len(values), math.nan), where=weight > 0)


def _sum_both_sides(values: Array, span: float) -> Array:
    keep = math.exp(-1 / span)
    sums = -values  # each value is in both of the sums below
    for order in (slice(None), slice(None, None, -1)):
        total, one_side = 0.0, []
        for value in values[order].tolist():
            total = total * keep + value
            one_side.append(total)
        sums += np.array(one_side)[order]
    return sums


def _numbers(values: Any) -> Array:
    try:
        return np.array(values, dtype=np.float64)  # None becomes NaN
    except (TypeError, ValueError):
        flat = [v if isinstance(v, int | float) else math.nan for v in values]
        return np.array(flat, dtype=np.float64)


def _array(value: Any) -> Array | None:
    try:
        return np.array(value, dtype=np.float64) if isinstance(value, list) else None
    except (TypeError, ValueError):  # ragged, or not numbers
        return None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold an object, got {type(value).__name__}")
    return value


def _read_text(path: Path) -> str:
    # A model of bytes may write any bytes.
    return path.read_bytes().decode("utf-8", errors="replace")
