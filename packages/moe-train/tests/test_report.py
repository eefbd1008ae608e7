"""What the report shows is what the run directory holds."""

import html
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_train.metrics import MetricsLog
from moe_train.report import write_report
from moe_train.report.heat_map import draw_load, draw_load_over_time, level, palette
from moe_train.report.line_chart import Chart, Line, draw_lines, thin
from moe_train.report.run_data import read_run, smooth
from moe_train.report.scale import log_ticks, nice_ticks, value_range, write_number

finite = st.floats(-1e6, 1e6).map(lambda v: float(f"{v:.5g}"))


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


# The page.


def test_every_record_can_be_read_off_the_page(tmp_path: Path) -> None:
    records = [train(step) for step in range(1, 121)]
    evals = [{"kind": "eval", "step": s, "loss": 6.0 - s / 50, "tokens": 64} for s in (0, 60, 120)]
    svgs = charts(report(make_run(tmp_path, [*evals[:1], *records, *evals[1:]])))
    keys = {
        "Loss": "loss",
        "Throughput": "tokens_per_second",
        "Gradient norm": "grad_norm",
        "Learning rate": "lr",
        "Expert imbalance, largest over layers": "imbalance",
    }
    for title, key in keys.items():
        shown = {text.split("\n")[0]: text for text in titles(svgs[title])}
        for record in records:
            words = shown[f"step {record['step']}"].split("\n")
            assert any(line.endswith(f" {write_number(record[key])}") for line in words), title
    for record in evals:
        assert f"validation {write_number(record['loss'])}" in "\n".join(titles(svgs["Loss"]))
    for record in records:
        for i, value in enumerate(record["entropy"]):
            text = "\n".join(titles(svgs["Router entropy by layer"]))
            assert f"step {record['step']}\n" in text
            assert f"layer {i} {write_number(value)}" in text


def test_headline_figures_are_the_runs(tmp_path: Path) -> None:
    records = [
        {"kind": "run", "step": 0, "world_size": 1},
        *(train(step, skipped=step in (3, 4)) for step in range(1, 101)),
        {"kind": "eval", "step": 50, "loss": 1.5, "tokens": 64},
        {"kind": "eval", "step": 100, "loss": 1.7, "tokens": 64},
        {"kind": "run", "step": 40, "world_size": 4},
    ]
    page = report(make_run(tmp_path, records, references={"bigram": 2.5, "trigram": 1.82}))
    text = " ".join(Page(page).text.split())
    assert "Validation loss 1.700 nats a byte (2.453 bits), 0.120 below the trigram table" in text
    assert "validation loss nats/byte 1.700 best 1.500" in text
    assert "throughput tokens/s 2,050 median" in text  # 2001 to 2100
    assert "expert imbalance largest / mean 2.50 median 2.00" in text  # 1.51 to 2.50
    assert "updates steps 100 2 skipped" in text
    assert "seen tokens 100k" in text
    assert "time 0:50 resumed 1 time" in text


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (1.0, "0.820 below the trigram table (1.82)"),
        (2.0, "0.500 below the bigram table (2.50)"),
        (3.0, "0.500 above the bigram table (2.50)"),
    ],
)
def test_the_summary_compares_with_the_best_reference_beaten(
    tmp_path: Path, loss: float, words: str
) -> None:
    records = [{"kind": "eval", "step": 1, "loss": loss, "tokens": 1}]
    run = make_run(tmp_path, records, references={"bigram": 2.5, "trigram": 1.82})
    assert words in report(run)


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = report(make_run(tmp_path, [train(s) for s in range(1, 30)], sample=b"hi"))
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(parsed.tags)
    names = {name for name, _ in parsed.attributes}
    assert not {name for name in names if name in ("src", "href", "xlink:href", "srcset")}
    assert not {name for name in names if name.startswith("on")}
    assert "url(" not in page
    assert "@import" not in page
    assert "http" not in page


NASTY = "</pre></style><script>alert(1)</script>&amp;\" onload='x' {{ 7*7 }}"


def test_text_from_the_run_is_shown_as_text(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "<b>run&",
        [
            {"kind": "run", "step": 0, "world_size": 1},
            train(1),
            {"kind": "run", "step": 1, "world_size": NASTY},
        ],
        config=f"# {NASTY}\n",
        sample=NASTY.encode() + b"\x00\x1b[31m\xff\xc3 \r\n\x7f\n",
        environment={NASTY: [NASTY, {"a": None}]},
        references={NASTY: 2.0},
        result={"loss": 1.23456789, "text": "\ud800"},
    )
    page = report(run)
    parsed = Page(page)
    assert "script" not in parsed.tags
    assert not {name for name, _ in parsed.attributes if name.startswith("on")}
    assert parsed.text.count(NASTY) >= 4 + 14  # sample, config, key, value; and label per chart
    assert "49" not in re.findall(r"<pre>(.*?)</pre>", page, re.S)[0]
    assert "␀␛[31m\ufffd\ufffd \n␡\n" in parsed.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)
    assert "<b>run&" in parsed.text
    assert "1.23457" in parsed.text


def _broken() -> list[dict[str, Any]]:
    odd = [math.nan, math.inf, -math.inf, 1e308, -1e308, 0.0]
    return [
        train(s, loss=v, grad_norm=v, lr=v, tokens_per_second=v, imbalance=v, skipped=True)
        | {"entropy": [v, v], "load": [[v] * 4] * 2, "seconds": v, "tokens": 5}
        for s, v in enumerate(odd, start=1)
    ]


CASES: dict[str, list[dict[str, Any]]] = {
    "nothing": [],
    "one": [train(1)],
    "two": [train(1), train(2)],
    "only an evaluation": [{"kind": "eval", "step": 0, "loss": 5.5, "tokens": 1}],
    "an evaluation that is not finite": [{"kind": "eval", "step": 0, "loss": math.nan}],
    "only a start": [{"kind": "run", "step": 0, "world_size": 1}],
    "numbers that are not finite": _broken(),
    "a constant": [train(s, loss=2.0, lr=0.0, grad_norm=1.0) for s in range(1, 50)],
    "all skipped": [train(s, loss=math.nan, skipped=True) for s in range(1, 9)],
    "one layer of one expert": [train(s, 1, 2, load=[[1.0]]) for s in range(1, 9)],
    "no layers": [train(s, entropy=[], load=[]) for s in range(1, 9)],
    "fields missing": [{"kind": "train", "step": s} for s in range(1, 9)],
    "layers that change": [train(1, 2), train(2, 3), train(3, 3)],
    "large steps": [train(10**9 + s) for s in range(3)],
    "resumed often": [{"kind": "run", "step": s // 2, "world_size": 2} for s in range(60)],
}


@pytest.mark.parametrize("records", CASES.values(), ids=list(CASES))
def test_a_degenerate_run_has_a_whole_report(tmp_path: Path, records: list[Any]) -> None:
    page = report(make_run(tmp_path, records, config=""))
    Page(page)
    assert set(charts(page)) == {
        "Loss",
        "Router entropy by layer",
        "Expert imbalance, largest over layers",
        "Throughput",
        "Gradient norm",
        "Learning rate",
        "Auxiliary losses",
    }
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        root = ET.fromstring(svg)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for element in root.iter():
            for name, limit in (("x", width), ("y", height), ("cx", width), ("cy", height)):
                if name in element.attrib:  # nan fails here too
                    assert -1 <= float(element.attrib[name]) <= limit + 1
            assert not re.search("nan|inf", element.attrib.get("d", ""))


def test_what_is_not_finite_or_off_the_scale_is_counted(tmp_path: Path) -> None:
    records = [train(s) for s in range(1, 201)]
    records[49]["loss"] = math.nan
    records[99]["loss"] = math.inf
    records[149]["loss"] = 1e9
    svg = charts(report(make_run(tmp_path, records)))["Loss"]
    notes = [t.text for t in svg.iter("text") if t.get("class") == "note"]
    assert notes == ["1 above the scale, 2 not finite"]
    value, _ = read_axis(svg, "y")
    assert value(22) < 7  # the spike does not flatten the rest
    # and it does not bend the mean
    for (_, y), record in zip(drawn(svg, "training"), records, strict=True):
        assert value(y) == pytest.approx(5.0 - 0.01 * record["step"], abs=0.05)


def test_skipped_steps_and_resumes_are_marked(tmp_path: Path) -> None:
    records = [train(s, skipped=s in (20, 30)) for s in range(1, 101)]
    starts = [{"kind": "run", "step": s, "world_size": w} for s, w in ((0, 1), (50, 4))]
    svg = charts(report(make_run(tmp_path, [*records, *starts])))["Loss"]
    value, slope = read_axis(svg, "x")
    marks = [p for p in svg.iter("path") if p.get("class") == "mark"]
    assert len(marks) == 1
    place = float(marks[0].attrib["d"][1:].split()[0])
    assert value(place) == pytest.approx(50, abs=slope)
    assert titles(svg)[0] == "resumed, 4 ranks at step 50"
    ticks = next(p for p in svg.iter("path") if p.get("class") == "skipped")
    steps = [value(float(x)) for x in re.findall(r"M([\d.]+)", ticks.attrib["d"])]
    assert steps == pytest.approx([20, 30], abs=slope)


def test_reference_lines_stand_at_their_values(tmp_path: Path) -> None:
    records = [train(s) for s in range(1, 101)]
    run = make_run(tmp_path, records, references={"bigram": 2.5, "trigram": 1.82})
    svgs = charts(report(run))

    def references(title: str) -> list[float]:
        value, _ = read_axis(svgs[title], "y")
        paths = [p for p in svgs[title].iter("path") if p.get("class") == "reference"]
        return [value(float(re.findall(r" ([\d.]+)H", p.attrib["d"])[0])) for p in paths]

    assert references("Loss") == pytest.approx([2.5, 1.82], abs=0.02)
    assert references("Router entropy by layer") == pytest.approx([math.log(4)], abs=0.01)
    assert references("Expert imbalance, largest over layers") == pytest.approx([1.0], abs=0.02)
    assert references("Throughput") == pytest.approx([2050.5], abs=10)
    labels = [t.text for t in svgs["Loss"].iter("text") if "end" in t.get("class", "")]
    assert {"bigram 2.5", "trigram 1.82", "training"} <= set(labels)


def test_a_large_run_stays_small_and_keeps_its_spikes(tmp_path: Path) -> None:
    records = [train(s, 2, 2) for s in range(1, 20_001)]
    for record in records:
        record["loss"] = 2.0 + (record["step"] == 17_777)
    run = make_run(tmp_path, records)
    page = report(run)
    assert len(page) < 1_000_000
    svg = charts(page)["Loss"]
    (top,) = [x for x, y in drawn(svg, "training, each step") if y < 100]
    value, slope = read_axis(svg, "x")
    assert value(top) == pytest.approx(17_777, abs=slope)
    assert any("training, each step 2 to 3" in title for title in titles(svg))


def test_many_layers_and_experts_stay_readable(tmp_path: Path) -> None:
    page = report(make_run(tmp_path, [train(s, 60, 128) for s in range(1, 61)]))
    assert len(page) < 3_000_000
    assert "Over time: the first and last of 60 layers and the 4 least even." in page
    assert 'aria-label="Load of experts at the end: most 1.17 % (layer 0 expert 0)' in page
    assert len(re.findall("<title>layer 59, expert 127: 0.781 %</title>", page)) == 1


def test_a_report_is_replaced_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run = make_run(tmp_path, [train(1)])
    first = report(run)
    before = {p.name for p in tmp_path.iterdir()}
    assert report(run) == first
    assert {p.name for p in tmp_path.iterdir()} == before


def test_a_file_that_cannot_be_understood_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, [], environment={"a": 1})
    (run / "environment.json").write_text("{")
    with pytest.raises(ValueError, match=r"environment\.json is not JSON"):
        write_report(run)
    (run / "environment.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"environment\.json must hold an object, got list"):
        write_report(run)
    (run / "environment.json").unlink()
    (run / "config.toml").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.toml"):
        write_report(run)
    assert not (run / "report.html").exists()


# The parts.


@given(
    points=st.dictionaries(st.integers(0, 1000), finite | st.just(math.nan), min_size=2),
    log=st.booleans(),
)
def test_points_are_drawn_where_the_ticks_say(points: dict[int, float], log: bool) -> None:
    x = np.array(sorted(points), dtype=float)
    y = np.array([abs(points[int(step)]) + 1e-3 if log else points[int(step)] for step in x])
    svg = ET.fromstring(
        draw_lines([Line(label="a", x=x, y=y, style="s0")], Chart(title="t", unit="u", log=log))
    )
    shown = np.isfinite(y)
    places = drawn(svg, "a")
    assert len(places) == shown.sum()
    low, high = value_range(y, log)
    ticks = [t for t in svg.iter("text") if t.get("class") == "y-tick"]
    if shown.any() and len(ticks) >= 2:
        value, slope = read_axis(svg, "y", log)
        for (_, py), v in zip(places, np.clip(y[shown], low, high), strict=True):
            assert value(py) == pytest.approx(v, abs=0 if log else slope, rel=slope if log else 0)
    steps = [t for t in svg.iter("text") if t.get("class") == "x-tick"]
    if len(steps) >= 2:
        value, slope = read_axis(svg, "x")
        for (px, _), step in zip(places, x[shown], strict=True):
            assert value(px) == pytest.approx(step, abs=slope)


def test_a_gap_breaks_the_line_and_a_lone_value_is_a_dot() -> None:
    y = np.array([1.0, 2.0, math.nan, 3.0, math.nan, 1.0])
    line = Line(label="<a>", x=np.arange(6.0), y=y, style="s0")
    svg = ET.fromstring(draw_lines([line], Chart(title="t", unit="u")))
    d = next(g for g in svg.iter("g") if g.get("data-label") == "<a>")[0].attrib["d"]
    assert re.sub(r"[-\d. ]+", "", d.replace("h0", "!")) == "MLM!M!"


@given(
    y=st.lists(finite | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=200),
    columns=st.integers(1, 20),
)
def test_thinning_keeps_order_and_extremes_and_stays_within_bounds(
    y: list[float], columns: int
) -> None:
    x, values = np.arange(float(len(y))), np.array(y)
    thin_x, thin_y = thin(x, values, columns)
    assert len(thin_x) <= 3 * columns
    assert (np.diff(thin_x) > 0).all()
    np.testing.assert_array_equal(thin_y, values[thin_x.astype(int)])
    seen = values[np.isfinite(values)]
    if len(seen):
        kept = thin_y[np.isfinite(thin_y)]
        assert (kept.min(), kept.max()) == (seen.min(), seen.max())
    assert np.isfinite(values).all() == np.isfinite(thin_y).all()


@given(y=st.lists(finite | st.just(math.nan), max_size=40), span=st.floats(1, 20))
def test_smoothing_is_the_weighted_mean_of_both_sides(y: list[float], span: float) -> None:
    values = np.array(y, dtype=float)
    known = np.flatnonzero(np.isfinite(values))
    for i, mean in enumerate(smooth(values, span)):
        weights = np.exp(-np.abs(known - i) / span)
        if len(known):
            expected = (weights * values[known]).sum() / weights.sum()
            assert mean == pytest.approx(expected, rel=1e-6, abs=1e-6)
        else:
            assert math.isnan(mean)


@given(low=finite, width=st.floats(1e-3, 1e6), count=st.integers(2, 10))
def test_ticks_are_round_even_and_inside(low: float, width: float, count: int) -> None:
    ticks = nice_ticks(low, low + width, count)
    slack = 1e-6 * (abs(low) + width)
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)
    assert count / 3 <= len(ticks) <= 2 * count + 1
    steps = np.diff(ticks)
    assert len(steps) == 0 or np.allclose(steps, steps[0], atol=slack)
    mantissas = {float(f"{s / 10 ** math.floor(math.log10(s) + 1e-6):.3g}") for s in steps[:1]}
    assert mantissas <= {1.0, 2.0, 5.0}


@given(low=st.floats(1e-9, 1e6), ratio=st.floats(10, 1e12))
def test_logarithmic_ticks_are_few_and_inside(low: float, ratio: float) -> None:
    ticks = log_ticks(low, low * ratio)
    assert 1 <= len(ticks) <= 13
    assert all(low <= tick <= low * ratio for tick in ticks)
    assert {f"{tick:e}"[0] for tick in ticks} <= {"1", "2", "5"}


@given(values=st.lists(finite, min_size=1, max_size=50))
def test_a_range_holds_all_values_but_distant_ones(values: list[float]) -> None:
    low, high = value_range(np.array(values))
    assert low < high
    inside = [v for v in values if low <= v <= high]
    assert len(inside) >= len(values) - 2


@given(value=st.floats(1e-12, 1e15) | st.floats(-1e15, -1e-12))
def test_a_written_number_reads_back_to_four_digits(value: float) -> None:
    assert parse_number(write_number(value)) == pytest.approx(value, rel=1e-3)


@given(experts=st.integers(1, 256), ratio=st.floats(0.26, 3.9))
def test_heat_is_neutral_at_the_even_share_and_symmetric_in_ratio(
    experts: int, ratio: float
) -> None:
    assert level(1 / experts, experts) == 10
    hot, cold = level(ratio / experts, experts), level(1 / ratio / experts, experts)
    assert hot is not None
    assert cold is not None
    assert abs(hot + cold - 20) <= 1
    more = level(ratio * 1.3 / experts, experts)
    assert more is not None
    assert more >= hot
    assert level(math.nan, experts) is None


def test_each_cell_of_the_heat_map_has_its_value_and_colour() -> None:
    load_LE = np.array([[0.25, 0.25, 0.5, 0.0], [0.7, 0.1, math.nan, 0.2]])
    svg = ET.fromstring(draw_load(load_LE, "load"))
    cells = {r[0].text: r.attrib["class"] for r in svg.iter("rect")}
    for i in range(2):
        for e in range(4):
            value = load_LE[i, e]
            words = "no number" if math.isnan(value) else f"{100 * value:.3g} %"
            q = level(float(value), 4)
            assert cells[f"layer {i}, expert {e}: {words}"] == ("qx" if q is None else f"q{q}")
    numbers = [t.text for t in svg.iter("text") if "cell" in t.get("class", "")]
    assert numbers == ["25.0", "25.0", "50.0", "0.0", "70.0", "10.0", "20.0"]
    assert "most 70 % (layer 1 expert 0)" in svg.attrib["aria-label"]
    assert "least 0 % (layer 0 expert 3)" in svg.attrib["aria-label"]


@given(levels=st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=12))
def test_the_map_over_time_has_every_cell_in_its_colour(levels: list[list[float]]) -> None:
    load_BE = np.array(levels)
    steps = np.arange(1.0, len(levels) + 1)
    svg = ET.fromstring(draw_load_over_time(steps, load_BE, "Layer 0", float(len(levels))))
    painted: dict[tuple[int, int], str] = {}
    for path in svg.iter("path"):
        for b, e, length in re.findall(r"M(\d+) (\d+)h(\d+)v1", path.attrib["d"]):
            for i in range(int(length)):
                assert (int(b) + i, int(e)) not in painted
                painted[int(b) + i, int(e)] = path.attrib["class"]
    expected = {
        (b, e): f"q{level(float(load_BE[b, e]), 3)}" for b in range(len(levels)) for e in range(3)
    }
    assert painted == expected
    most = f"most {100 * load_BE[0].max():.3g} % (expert {load_BE[0].argmax()})"
    assert most in titles(svg)[0]


@pytest.mark.parametrize("dark", [False, True])
def test_the_palette_is_neutral_in_the_middle_and_grows_to_both_ends(dark: bool) -> None:
    colours = re.findall(r"--q(\d+):#(..)(..)(..)", palette(dark))
    assert [int(q) for q, *_ in colours] == list(range(21))
    rgb = np.array([[int(c, 16) for c in rest] for _, *rest in colours])
    assert np.ptp(rgb[10]) <= 12  # grey
    saturation = np.ptp(rgb, axis=1)
    assert (np.diff(saturation[10:]) > 0).all()
    assert (np.diff(saturation[:11]) < 0).all()
    assert (rgb[:10, 2] > rgb[:10, 0]).all()  # blue for less
    assert (rgb[11:, 0] > rgb[11:, 2]).all()  # orange for more


def test_loads_are_averaged_over_buckets(tmp_path: Path) -> None:
    records = [train(s, 1, 2, load=[[s / 10, 1 - s / 10]]) for s in range(1, 11)]
    steps, load_BLE = read_run(make_run(tmp_path, records)).per_layer("load", 5)
    assert steps.tolist() == [1, 3, 5, 7, 9]
    np.testing.assert_allclose(load_BLE[:, 0, 0], [0.15, 0.35, 0.55, 0.75, 0.95])


def test_labels_are_escaped_wherever_they_stand() -> None:
    line = Line(label="<i>&", x=np.arange(3.0), y=np.arange(3.0), style="s0")
    chart = Chart(title='"t<', unit="<u>", references=[("<r>", 1.0)], marks=[("<m>", 1.0)])
    text = draw_lines([line], chart)
    svg = ET.fromstring(text)
    assert [e.tag for e in svg.iter() if e.tag in "iurm"] == []
    assert html.unescape(svg.attrib["aria-label"]).startswith('"t<: <i>& from 0 to 2')
