"""The words and headline numbers at the top of the page."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_train.console import format_duration
from moe_train.report.run_data import Array, RunData, smooth
from moe_train.report.scale import value_range, write_number


@dataclass(frozen=True)
class Figure:
    """One headline number.

    Attributes:
        value: The number, as text.
        unit: Of the number.
        name: What it is.
        note: What it means.
    """

    value: str
    unit: str
    name: str
    note: str = ""


def summary(run: RunData) -> str:
    """Say in one sentence how well the model predicts."""
    _, losses = run.eval_points()
    finite = losses[np.isfinite(losses)]
    if len(finite) == 0:
        return "No validation loss was measured yet."
    last = float(finite[-1])
    text = f"Validation loss {last:.3f} {run.unit} ({last / math.log(2):.3f} bits)"
    for name, value in sorted(run.references.items(), key=lambda item: item[1]):
        if last < value:
            return f"{text}, {value - last:.3f} below the {name} table ({value:.2f})."
    if run.references:
        name, value = max(run.references.items(), key=lambda item: item[1])
        return f"{text}, {last - value:.3f} above the {name} table ({value:.2f})."
    return f"{text}."


def headline_figures(run: RunData) -> list[Figure]:
    """Return the headline numbers that the run has."""
    _, losses = run.eval_points()
    best = losses[np.isfinite(losses)]
    figures = []
    if len(best):
        note = f"best {best.min():.3f}"
        figures.append(
            Figure(f"{best[-1]:.3f}", run.unit.replace(" a ", "/"), "validation loss", note)
        )
    if not run.train:
        return figures
    last = run.train[-1]
    never = sum(last["never_selected"]) if isinstance(last.get("never_selected"), list) else None
    mfu = run.column("mfu")
    skipped = sum(int(record.get("skipped", 0)) for record in run.train)
    mean = smoothed(run, "loss")[-1]
    speed = run.column("tokens_per_second")
    worst = run.column("imbalance")
    figures += [
        Figure(_short(mean, 3), run.unit.replace(" a ", "/"), "training loss", "smoothed"),
        Figure(_short(median(speed)), "tokens/s", "throughput", "median"),
        Figure(
            _short(worst[-1], 2),
            "largest / mean",
            "expert imbalance",
            f"median {_short(median(worst), 2)}",
        ),
        Figure(
            _short(float(last["step"]), 0) if last["step"] < 1e6 else _short(last["step"]),
            "steps",
            "updates",
            f"{skipped} skipped" if skipped else "none skipped",
        ),
        Figure(_short(float(last.get("tokens", math.nan))), "tokens", "seen"),
        Figure(_time(last.get("seconds")), "", "time", _starts(run)),
    ]
    if np.isfinite(mfu).any():
        figures.append(Figure(f"{100 * median(mfu):.1f}", "% of the peak", "model FLOPs", "median"))
    if never is not None:
        figures.append(Figure(str(never), "experts", "never selected", "in the last record"))
    return figures


def _starts(run: RunData) -> str:
    resumes = len(run.starts) - 1
    return "one run" if resumes < 1 else f"resumed {resumes} time{'s' * (resumes > 1)}"


def _time(seconds: Any) -> str:
    known = isinstance(seconds, int | float) and math.isfinite(seconds)
    return format_duration(seconds) if known else "—"


def _short(value: float, decimals: int | None = None) -> str:
    if not math.isfinite(value):
        return "not finite"
    return write_number(value, 3) if decimals is None else f"{value:,.{decimals}f}"


def median(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def smoothed(run: RunData, key: str) -> Array:
    """Smooth a column over some hundredths of the run, without the spikes off its scale."""
    values = run.column(key)
    low, high = value_range(values)
    inside = np.where((values >= low) & (values <= high), values, math.nan)
    return smooth(inside, max(0.5, len(values) / 80))
