"""All parts of the report on one page."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from moe_train.console import format_duration
from moe_train.metrics import Record
from moe_train.report.heat_map import draw_legend, draw_load, draw_load_over_time, palette
from moe_train.report.line_chart import Chart, Line, draw_lines
from moe_train.report.run_data import Array, RunData, read_run, smooth
from moe_train.report.scale import value_range, write_number

_BUCKETS = 240  # along the steps, for lines of layers
_HEAT_BUCKETS = 48
_MAPS = 6  # layers whose load is drawn over time
_NAMED_LAYERS = 8  # with more, colours go from the first layer to the last


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


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run directory and return its path.

    Reads ``config.toml`` and ``metrics.jsonl``, and, where they exist, ``environment.json``,
    ``references.json`` (losses in nats a byte by name), ``sample.txt`` and ``result.json``. The
    file appears at once and needs no other file and no network.

    Args:
        run_dir: The directory of a run, finished or not.

    Raises:
        FileNotFoundError: If ``config.toml`` or ``metrics.jsonl`` is missing.
        ValueError: If a file cannot be understood; the message names it.
    """
    html = render_page(read_run(run_dir))
    path = run_dir / "report.html"
    temporary = path.with_name("report.html.tmp")
    temporary.write_bytes(html.encode("utf-8", errors="replace"))
    os.replace(temporary, path)
    return path


def render_page(run: RunData) -> str:
    """Return the page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(
        resources.files("moe_train.report").joinpath("template.html.j2").read_text("utf-8")
    )
    charts = {name: Markup(svg) for name, svg in _charts(run).items()}
    return template.render(
        run=run,
        light=Markup(palette(dark=False)),
        dark=Markup(palette(dark=True)),
        summary=_summary(run),
        figures=_figures(run),
        charts=charts,
        loads=[(title, Markup(svg)) for title, svg in _loads(run)],
        load_note=_load_note(run),
        sample=None if run.sample is None else _printable(run.sample),
        config=_printable(run.config),
        tables=[
            (name, [(key, _printable(_words(value))) for key, value in table.items()])
            for name, table in (("Result", run.result), ("Environment", run.environment))
            if table
        ],
    )


# The words at the top.


def _summary(run: RunData) -> str:
    """Say in one sentence how well the model predicts."""
    _, losses = run.eval_points()
    finite = losses[np.isfinite(losses)]
    if len(finite) == 0:
        return "No validation loss was measured yet."
    last = float(finite[-1])
    text = f"Validation loss {last:.3f} nats a byte ({last / math.log(2):.3f} bits)"
    for name, value in sorted(run.references.items(), key=lambda item: item[1]):
        if last < value:
            return f"{text}, {value - last:.3f} below the {name} table ({value:.2f})."
    if run.references:
        name, value = max(run.references.items(), key=lambda item: item[1])
        return f"{text}, {last - value:.3f} above the {name} table ({value:.2f})."
    return f"{text}."


def _figures(run: RunData) -> list[Figure]:
    _, losses = run.eval_points()
    best = losses[np.isfinite(losses)]
    figures = []
    if len(best):
        note = f"best {best.min():.3f}"
        figures.append(Figure(f"{best[-1]:.3f}", "nats/byte", "validation loss", note))
    if not run.train:
        return figures
    last = run.train[-1]
    skipped = sum(int(record.get("skipped", 0)) for record in run.train)
    mean = _smooth(run, "loss")[-1]
    speed = run.column("tokens_per_second")
    worst = run.column("imbalance")
    figures += [
        Figure(_short(mean, 3), "nats/byte", "training loss", "smoothed"),
        Figure(_short(_median(speed)), "tokens/s", "throughput", "median"),
        Figure(
            _short(worst[-1], 2),
            "largest / mean",
            "expert imbalance",
            f"median {_short(_median(worst), 2)}",
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


def _median(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


# The charts.


def _smooth(run: RunData, key: str) -> Array:
    """Smooth a column over some hundredths of the run, without the spikes off its scale."""
    values = run.column(key)
    low, high = value_range(values)
    inside = np.where((values >= low) & (values <= high), values, math.nan)
    return smooth(inside, max(0.5, len(values) / 80))


def _spreads(lines: Sequence[Line]) -> bool:
    """Tell whether values differ so much that only a logarithmic scale shows them all."""
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in lines])
    return bool(len(values) > 0 and values.min() > 0 and values.max() > 30 * values.min())


def _charts(run: RunData) -> dict[str, str]:
    steps = run.steps()
    skipped = [r["step"] for r in run.train if r.get("skipped")]
    marks = [(_resume(record), record["step"]) for record in run.starts[1:]]

    def both(key: str) -> list[Line]:
        values = run.column(key)
        return [
            Line(label="value", x=steps, y=values, style="raw", named=False),
            Line(label="mean", x=steps, y=_smooth(run, key), style="mean"),
        ]

    def single(key: str, label: str, style: str) -> Line:
        return Line(label=label, x=steps, y=run.column(key), style=style)

    def chart(title: str, unit: str, lines: Sequence[Line], **options: Any) -> str:
        return draw_lines(lines, Chart(title=title, unit=unit, marks=marks, **options))

    entropy, experts = _layer_lines(run, "entropy"), _experts(run)
    uniform = [("uniform", math.log(experts))] if experts else []
    median = _median(run.column("tokens_per_second"))
    rate = [single("lr", "learning rate", "s0")]
    auxiliary = [single("balance_loss", "balance loss", "s0"), single("z_loss", "z loss", "s1")]
    norms = both("grad_norm")
    return {
        "loss": chart(
            "Loss", "nats a byte", _loss_lines(run), width=1120, height=400,
            references=list(run.references.items()), skipped=skipped,
        ),
        "entropy": chart("Router entropy by layer", "nats", entropy, references=uniform),
        "imbalance": chart(
            "Expert imbalance, largest over layers", "largest load / mean load",
            both("imbalance"), references=[("even", 1.0)],
        ),
        "throughput": chart(
            "Throughput", "tokens a second", both("tokens_per_second"), zero=True,
            references=[("median", median)],
        ),
        "grad_norm": chart(
            "Gradient norm", "L2 norm before clipping", norms, log=_spreads(norms), skipped=skipped,
        ),
        "lr": chart("Learning rate", "learning rate", rate, zero=True),
        "auxiliary": chart("Auxiliary losses", "a token", auxiliary, log=_spreads(auxiliary)),
    }  # fmt: skip


def _resume(record: Record) -> str:
    ranks = record.get("world_size")
    return "resumed" if ranks is None else f"resumed, {ranks} rank{'s' * (ranks != 1)}"


def _loss_lines(run: RunData) -> list[Line]:
    steps, values = run.steps(), run.column("loss")
    eval_steps, eval_losses = run.eval_points()
    lines = [
        Line(label="training, each step", x=steps, y=values, style="raw", named=False),
        Line(label="training", x=steps, y=_smooth(run, "loss"), style="mean"),
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


# The loads.


def _experts(run: RunData) -> int:
    _, load_BLE = run.per_layer("load", 1)
    return load_BLE.shape[2] if load_BLE.ndim == 3 else 0


def _final_load(run: RunData) -> Array | None:
    """Return the mean load of the last tenth of the records, [layers, experts]."""
    _, load_BLE = run.per_layer("load", 10)
    return load_BLE[-1] if load_BLE.ndim == 3 and load_BLE.size else None


def _loads(run: RunData) -> list[tuple[str, str]]:
    """Return titled drawings: all layers at the end, the legend, then layers over time."""
    final = _final_load(run)
    if final is None:
        return []
    steps, load_BLE = run.per_layer("load", _HEAT_BUCKETS)
    experts = final.shape[1]
    drawings = [
        ("At the end, all layers", draw_load(final, "Load of experts at the end")),
        ("", draw_legend(experts)),
    ]
    last = float(run.steps()[-1])
    for i in _layers_to_show(final):
        title = f"Layer {i}"
        drawings.append((title, draw_load_over_time(steps, load_BLE[:, i], title, last)))
    return drawings


def _layers_to_show(load_LE: Array) -> list[int]:
    """Choose the first and the last layer and the least even of the others."""
    layers = len(load_LE)
    if layers <= _MAPS:
        return list(range(layers))
    spread = np.nan_to_num(load_LE, nan=math.inf).max(axis=1)
    spread[[0, -1]] = -math.inf
    return sorted([0, layers - 1, *np.argsort(-spread, kind="stable")[: _MAPS - 2].tolist()])


def _load_note(run: RunData) -> str:
    final = _final_load(run)
    if final is None:
        return "No loads were recorded."
    layers, experts = final.shape
    starved = int((final * experts < 0.1).sum())
    note = f"Share of routed tokens; an even share is 1/{experts} = {100 / experts:.3g} %. "
    note += (
        f"{starved} of {layers * experts} experts got less than a tenth of it"
        if starved
        else "No expert got less than a tenth of it"
    )
    note += " in the last tenth of the steps."
    if layers > _MAPS:
        note += f" Over time: the first and last of {layers} layers and the {_MAPS - 2} least even."
    return note


# Text.


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_words(item) for item in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _printable(text: str) -> str:
    """Replace control characters, which HTML forbids, by their pictures."""
    text = text.replace("\r\n", "\n")
    return "".join(
        chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else "␡" if "\x7f" <= c < "\xa0" else c
        for c in text
    )
