"""Laws of the metrics file."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_train.metrics import MetricsError, MetricsLog, read_metrics

numbers = st.floats() | st.integers() | st.booleans()
records = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["train", "eval", "run"]),
        "step": st.integers(0, 20),
        "loss": numbers,
        "entropy": st.lists(numbers, max_size=3),
        "load": st.lists(st.lists(numbers, max_size=3), max_size=3),
        "note": st.text(max_size=5),
    }
)


def same(a: Any, b: Any) -> bool:
    """Equality in which NaN equals itself, and 1, 1.0 and True all differ."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (math.isnan(a) and math.isnan(b)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def fresh(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("run") / "metrics.jsonl"


@given(written=st.lists(records, max_size=6))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, written: list[dict[str, Any]]
) -> None:
    path = fresh(tmp_path_factory)
    with MetricsLog(path) as log:
        for n, record in enumerate(written, start=1):
            log.write(record)
            assert same(read_metrics(path), written[:n])  # nothing is held back


@given(written=st.lists(records, min_size=1, max_size=6), data=st.data())
def test_a_cut_at_any_byte_loses_only_the_line_it_falls_into(
    tmp_path_factory: pytest.TempPathFactory, written: list[dict[str, Any]], data: st.DataObject
) -> None:
    path = fresh(tmp_path_factory)
    with MetricsLog(path) as log:
        for record in written:
            log.write(record)
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    assert same(read_metrics(path), written[:whole])
    with MetricsLog(path) as log:
        log.write(written[-1])
    assert same(read_metrics(path), [*written[:whole], written[-1]])


@given(written=st.lists(records, max_size=8), step=st.integers(-1, 21))
def test_truncation_keeps_the_steps_up_to_it_and_appending_goes_on(
    tmp_path_factory: pytest.TempPathFactory, written: list[dict[str, Any]], step: int
) -> None:
    path = fresh(tmp_path_factory)
    with MetricsLog(path) as log:
        for record in written:
            log.write(record)
        log.truncate_after(step)
        kept = [record for record in written if record["step"] <= step]
        assert same(read_metrics(path), kept)
        log.write({"kind": "run", "step": step})
    assert same(read_metrics(path), [*kept, {"kind": "run", "step": step}])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_every_line_is_strict_json(path: Path) -> None:
    with MetricsLog(path) as log:
        log.write({"kind": "train", "step": 1, "loss": math.nan, "load": [[math.inf, -math.inf]]})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert line["loss"] == "NaN"
    assert line["load"] == [["Infinity", "-Infinity"]]


def test_a_broken_line_in_the_middle_is_named(path: Path) -> None:
    path.parent.mkdir()
    for line in ('{"kind": "eval"', "[1]", '{"kind": "eval"}', "\0\0", ""):
        path.write_text('{"kind": "run", "step": 0}\n' + line + "\n")
        with pytest.raises(MetricsError, match=r"metrics\.jsonl:2 is not a metrics record"):
            read_metrics(path)


def test_a_record_without_kind_or_step_is_refused_before_it_is_written(path: Path) -> None:
    with MetricsLog(path) as log:
        with pytest.raises(ValueError, match=r"a record needs kind and step, got \['kind'\]"):
            log.write({"kind": "train"})
        with pytest.raises(ValueError, match=r"got \['step'\]"):
            log.write({"step": 1})
    assert read_metrics(path) == []
