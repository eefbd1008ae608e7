"""The report shows router health, says what was forced, and lists alarms once each."""

import math
from pathlib import Path

import pytest
from moe_train.report.run_data import read_run
from moe_train.report.scale import write_number
from report_runs import Page, charts, make_run, report, titles, train

TITLES = {
    "Largest to mean load, worst layer",
    "Balance score and distance from even",
    "Gerrymander index by layer",
    "Entropy deficit of the load by layer",
    "Experts never selected, routes dropped",
    "Time of a step by part",
    "Model FLOPs a second and device",
    "Model FLOP utilisation",
    "Device memory, peak",
}


def healthy(step: int, **changes) -> dict:
    return train(step) | {
        "expert_requested": [1.5, 2.0 + step / 10], "expert_kept": [1.5, 1.75],
        "rank_requested": [1.25, 1.3], "rank_kept": [1.2, 1.1], "dropped": [0.0, 0.25],
        "entropy_deficit": [0.1, 0.2], "never_selected": [0, 3], "score": [0.1, -0.3],
        "distance": [0.2, 0.6], "gerrymander": [0.0, 0.01 * step], "alarms": [],
        "parts": {"data": 0.01, "forward": 0.25}, "mfu": 0.41, "tflops": 405.0, "memory_bytes": 2e9,
        "memory_reserved_bytes": 3e9,
    } | changes  # fmt: skip


def test_every_number_of_health_can_be_read_off_the_page(tmp_path: Path) -> None:
    records = [healthy(step) for step in range(1, 31)]
    page = report(make_run(tmp_path, records))
    svgs = charts(page)
    assert set(svgs) > TITLES
    shown = {title: "\n".join(titles(svg)) for title, svg in svgs.items()}
    for step in (1, 17, 30):
        worst = shown["Largest to mean load, worst layer"].split(f"step {step}\n")[1]
        assert worst.startswith(f"experts, requested {write_number(2.0 + step / 10)}\n")
    for words in ("experts, kept 1.75", "ranks, requested 1.3", "ranks, kept 1.2"):
        assert words in shown["Largest to mean load, worst layer"]
    both = shown["Balance score and distance from even"]
    assert "what the usual loss says -0.1\nwhat the load is 0.4" in both
    assert f"layer 1 {write_number(0.3)}" in shown["Gerrymander index by layer"]
    lost = shown["Experts never selected, routes dropped"]
    assert "never selected, experts 3\ndropped, fraction 0.125" in lost
    assert "forward 0.25" in shown["Time of a step by part"]
    text = " ".join(Page(page).text.split())
    assert "model FLOPs % of the peak 41.0 median" in text
    assert "never selected experts 3 in the last record" in text


def test_without_numbers_there_are_no_charts_of_them(tmp_path: Path) -> None:
    assert not TITLES & set(charts(report(make_run(tmp_path, [train(1), train(2)]))))


def test_an_alarm_is_listed_once_with_its_steps_and_last_words(tmp_path: Path) -> None:
    records = [
        healthy(
            s,
            alarms=[f"layer 1 gerrymander: by {s}"] * (3 <= s <= 7)
            + ["layer 0 starved: 2"] * (s == 5),
        )
        for s in range(1, 10)
    ]
    run = make_run(tmp_path, records)
    assert read_run(run).alarms() == [
        "layer 0 starved: 2 (1 records, from step 5 to 5)",
        "layer 1 gerrymander: by 7 (5 records, from step 3 to 7)",
    ]
    text = Page(report(run)).text
    assert "layer 1 gerrymander: by 7" in text
    assert "Alarms" in text
    assert "Alarms" not in Page(report(make_run(tmp_path / "b", [healthy(1)]))).text


@pytest.mark.parametrize("kind", ["run", "train", "eval"])
def test_a_label_on_any_record_stands_on_the_page(tmp_path: Path, kind: str) -> None:
    label = "forced routing: <uniform>"
    records = [
        {"kind": "run", "step": 0, "world_size": 1}, healthy(1),
        {"kind": "eval", "step": 1, "loss": 2.0, "tokens": 1},
    ]  # fmt: skip
    records = [r | ({"labels": [label]} if r["kind"] == kind else {}) for r in records]
    page = report(make_run(tmp_path, records))
    assert Page(page).text.count(label) == 1
    assert "<uniform>" not in page


def test_health_that_is_odd_or_changes_shape_breaks_nothing(tmp_path: Path) -> None:
    odd = [
        healthy(1, distance=[1.0]), healthy(2, score=[math.nan, math.inf]), healthy(3, parts=None),
        healthy(4, alarms="layer", labels="none"), healthy(5, parts={"data": math.nan, "x": 1.0}),
        healthy(6, never_selected=None, gerrymander=["a", "b"]),
    ]  # fmt: skip
    Page(report(make_run(tmp_path, odd)))
