"""Runs made of records, and a look at the reports that come of them."""

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from moe_train.metrics import MetricsLog
from moe_train.report import write_report


def train(step: int, layers: int = 2, experts: int = 4, **changes: Any) -> dict[str, Any]:
    load = np.full((layers, experts), 1 / experts)
    load[0, 0] += 0.5 / experts
    load[0, 1] -= 0.5 / experts
    record = {
        "kind": "train",
        "step": step,
        "loss": 5.0 - 0.01 * step,
        "balance_loss": 1.0 + 1 / step,
        "z_loss": 0.02,
        "grad_norm": 3.0 / step,
        "lr": 1e-3 * step,
        "skipped": False,
        "tokens": 1000 * step,
        "seconds": 0.5 * step,
        "tokens_per_second": 2000.0 + step,
        "imbalance": 1.5 + step / 100,
        "entropy": [math.log(experts) - 0.001 * step - 0.1 * i for i in range(layers)],
        "load": load.tolist(),
    }
    return record | changes


def make_run(directory: Path, records: list[dict[str, Any]], **files: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    with MetricsLog(directory / "metrics.jsonl") as log:
        for record in records:
            log.write(record)
    (directory / "config.toml").write_text(files.pop("config", "[model]\ndim = 96\n"))
    for name, content in files.items():
        if isinstance(content, bytes):
            (directory / f"{name}.txt").write_bytes(content)
        else:
            (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


class Page(HTMLParser):
    """Collects what a browser would fetch, run or show, and checks that elements nest."""

    VOID = ("meta", "br", "hr", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.text += " "

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def report(directory: Path) -> str:
    path = write_report(directory)
    assert path == directory / "report.html"
    return path.read_text(encoding="utf-8")


def charts(page: str) -> dict[str, ET.Element]:
    """Return the line charts by title; each must be well-formed XML by itself."""
    svgs = [ET.fromstring(svg) for svg in re.findall(r'<svg class="chart".*?</svg>', page, re.S)]
    return {svg.attrib["aria-label"].partition(":")[0]: svg for svg in svgs}


def titles(svg: ET.Element) -> list[str]:
    return [t.text or "" for t in svg.iter("title")]


def drawn(svg: ET.Element, label: str) -> list[tuple[float, float]]:
    """Return the places of the points of a line, gaps left out."""
    group = next(g for g in svg.iter("g") if g.get("data-label") == label)
    d = group[0].attrib["d"]
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", d)]


def parse_number(text: str) -> float:
    scale = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1.0)
    return float(text.rstrip("kMG").replace(",", "")) * scale


def read_axis(svg: ET.Element, axis: str, log: bool = False) -> Any:
    """Return a function from places to values, from the first and last tick alone."""
    ticks = [t for t in svg.iter("text") if t.get("class") == f"{axis}-tick"]
    assert len(ticks) >= 2
    places = [float(t.attrib["x"] if axis == "x" else t.attrib["data-y"]) for t in ticks]
    values = [parse_number(t.text or "") for t in ticks]
    if log:
        values = [math.log(value) for value in values]
    slope = (values[-1] - values[0]) / (places[-1] - places[0])

    def value(place: float) -> float:
        linear = values[0] + (place - places[0]) * slope
        return math.exp(linear) if log else linear

    return value, abs(slope)
