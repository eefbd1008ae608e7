"""What the report shows is what the run directory holds."""

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from moe_train.report import write_report
from moe_train.report.scale import write_number
from report_runs import Page, charts, drawn, make_run, read_axis, report, titles, train


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


def test_losses_are_of_tokens_where_tokens_are_not_bytes(tmp_path: Path) -> None:
    one = {"kind": "eval", "step": 1, "loss": 3.0, "nats_per_byte": 1.0, "tokens": 64}
    page = report(make_run(tmp_path, [train(1), one]))
    text = " ".join(Page(page).text.split())
    assert "Validation loss 3.000 nats a token (4.328 bits)." in text
    assert "validation loss nats/token 3.000" in text
    assert "byte" not in text.partition("Validation loss 3.000")[2].partition("Router")[0]


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
