"""The parts of the report: scales, line charts, heat maps, smoothing."""

import html
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_train.report.heat_map import draw_load, draw_load_over_time, level, palette
from moe_train.report.line_chart import Chart, Line, draw_lines, thin
from moe_train.report.run_data import read_run, smooth
from moe_train.report.scale import log_ticks, nice_ticks, value_range, write_number
from report_runs import drawn, make_run, parse_number, read_axis, titles, train

finite = st.floats(-1e6, 1e6).map(lambda v: float(f"{v:.5g}"))


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
