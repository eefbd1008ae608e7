"""All parts of the report on one page."""

import os
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from moe_train.report.charts import draw_charts, draw_router_charts
from moe_train.report.figures import headline_figures, summary
from moe_train.report.heat_map import palette
from moe_train.report.loads import draw_loads, load_note
from moe_train.report.run_data import RunData, read_run


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
    charts = {name: Markup(svg) for name, svg in draw_charts(run).items()}
    return template.render(
        run=run,
        light=Markup(palette(dark=False)),
        dark=Markup(palette(dark=True)),
        summary=summary(run),
        figures=headline_figures(run),
        charts=charts,
        labels=[_printable(label) for label in run.labels()],
        alarms=[_printable(line) for line in run.alarms()],
        routers=[(title, Markup(svg)) for title, svg in draw_router_charts(run)],
        loads=[(title, Markup(svg)) for title, svg in draw_loads(run)],
        load_note=load_note(run),
        sample=None if run.sample is None else _printable(run.sample),
        config=_printable(run.config),
        tables=[
            (name, [(key, _printable(_words(value))) for key, value in table.items()])
            for name, table in (("Result", run.result), ("Environment", run.environment))
            if table
        ],
    )


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
