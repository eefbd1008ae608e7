"""The line charts of the page."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moe_train.metrics import Record
from moe_train.report.figures import median, smoothed
from moe_train.report.line_chart import Chart, Line, draw_lines
from moe_train.report.router_charts import router_charts
from moe_train.report.run_data import RunData

_BUCKETS = 240  # along the steps, for lines of layers
_NAMED_LAYERS = 8  # with more, colours go from the first layer to the last


def _spreads(lines: Sequence[Line]) -> bool:
    """Tell whether values differ so much that only a logarithmic scale shows them all."""
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in lines])
    return bool(len(values) > 0 and values.min() > 0 and values.max() > 30 * values.min())


def draw_charts(run: RunData) -> dict[str, str]:
    """Return the charts of every run as SVG, by name."""
    steps = run.steps()
    skipped = [r["step"] for r in run.train if r.get("skipped")]
    marks = _marks(run)

    def both(key: str) -> list[Line]:
        values = run.column(key)
        return [
            Line(label="value", x=steps, y=values, style="raw", named=False),
            Line(label="mean", x=steps, y=smoothed(run, key), style="mean"),
        ]

    def single(key: str, label: str, style: str) -> Line:
        return Line(label=label, x=steps, y=run.column(key), style=style)

    def chart(title: str, unit: str, lines: Sequence[Line], **options: Any) -> str:
        return draw_lines(lines, Chart(title=title, unit=unit, marks=marks, **options))

    entropy, experts = _layer_lines(run, "entropy"), _experts(run)
    uniform = [("uniform", math.log(experts))] if experts else []
    middle = median(run.column("tokens_per_second"))
    rate = [single("lr", "learning rate", "s0")]
    auxiliary = [single("balance_loss", "balance loss", "s0"), single("z_loss", "z loss", "s1")]
    norms = both("grad_norm")
    return {
        "loss": chart(
            "Loss", run.unit, _loss_lines(run), width=1120, height=400,
            references=list(run.references.items()), skipped=skipped,
        ),
        "entropy": chart("Router entropy by layer", "nats", entropy, references=uniform),
        "imbalance": chart(
            "Expert imbalance, largest over layers", "largest load / mean load",
            both("imbalance"), references=[("even", 1.0)],
        ),
        "throughput": chart(
            "Throughput", "tokens a second", both("tokens_per_second"), zero=True,
            references=[("median", middle)],
        ),
        "grad_norm": chart(
            "Gradient norm", "L2 norm before clipping", norms, log=_spreads(norms), skipped=skipped,
        ),
        "lr": chart("Learning rate", "learning rate", rate, zero=True),
        "auxiliary": chart("Auxiliary losses", "a token", auxiliary, log=_spreads(auxiliary)),
    }  # fmt: skip


def draw_router_charts(run: RunData) -> list[tuple[str, str]]:
    """Return the titled charts of router health and cost that the run has numbers for."""
    charts = router_charts(run, lambda key: _layer_lines(run, key))
    return [
        (chart.title, draw_lines(lines, replace(chart, marks=_marks(run))))
        for chart, lines in charts.values()
    ]


def _marks(run: RunData) -> list[tuple[str, float]]:
    return [(_resume(record), record["step"]) for record in run.starts[1:]]


def _resume(record: Record) -> str:
    ranks = record.get("world_size")
    return "resumed" if ranks is None else f"resumed, {ranks} rank{'s' * (ranks != 1)}"


def _loss_lines(run: RunData) -> list[Line]:
    steps, values = run.steps(), run.column("loss")
    eval_steps, eval_losses = run.eval_points()
    lines = [
        Line(label="training, each step", x=steps, y=values, style="raw", named=False),
        Line(label="training", x=steps, y=smoothed(run, "loss"), style="mean"),
    ]
    if len(eval_steps):
        lines.append(Line(label="validation", x=eval_steps, y=eval_losses, style="s1", dots=True))
    return lines


def _layer_lines(run: RunData, key: str) -> list[Line]:
    steps, values_BL = run.per_layer(key, _BUCKETS)
    if values_BL.ndim != 2:
        return []
    layers = values_BL.shape[1]
    few = layers <= _NAMED_LAYERS
    return [
        Line(
            label=f"layer {i}",
            x=steps,
            y=values_BL[:, i],
            style=f"s{i}" if few else f"depth d{round(10 * i / (layers - 1))}",
            named=few or i in (0, layers - 1),
        )
        for i in range(layers)
    ]


def _experts(run: RunData) -> int:
    _, load_BLE = run.per_layer("load", 1)
    return load_BLE.shape[2] if load_BLE.ndim == 3 else 0
