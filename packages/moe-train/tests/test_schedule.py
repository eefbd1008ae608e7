"""The rate is a function of the step, the settings and the planned total alone."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_train.config import OptimizerConfig
from moe_train.errors import RunError
from moe_train.metrics import read_metrics
from moe_train.schedule import check_schedule, learning_rate, planned_total
from runs import run

SHAPES = ("cosine", "linear", "wsd")


def rates(config: OptimizerConfig, total: int, steps: int) -> list[float]:
    return [learning_rate(config, step, total) for step in range(steps)]


def test_warm_up_rises_linearly_and_a_constant_rate_stays() -> None:
    assert rates(OptimizerConfig(lr=0.5, warmup_steps=4), 5, 7) == [
        0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5,
    ]  # fmt: skip
    assert rates(OptimizerConfig(lr=0.5, warmup_steps=0), 5, 2) == [0.5, 0.5]


def test_values_of_each_shape_by_hand() -> None:
    common = {"lr": 1.0, "warmup_steps": 2, "floor": 0.2}
    assert rates(OptimizerConfig(schedule="linear", **common), 6, 8) == pytest.approx(
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )
    half = [0.2 + 0.8 * (1 + math.cos(math.pi * x)) / 2 for x in (0, 0.25, 0.5, 0.75, 1)]
    assert rates(OptimizerConfig(schedule="cosine", **common), 6, 7) == pytest.approx(
        [0.5, 1.0, *half]
    )
    assert rates(OptimizerConfig(schedule="wsd", **common), 10, 11) == pytest.approx(
        [0.5] + [1.0] * 8 + [0.6, 0.2]  # a fifth of 10: over the steps from 8 to 10
    )
    late = OptimizerConfig(schedule="cosine", decay_steps=2, **common)
    assert rates(late, 6, 8) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.6, 0.2, 0.2])


@given(
    shape=st.sampled_from(SHAPES),
    warmup=st.integers(0, 20),
    decay=st.integers(0, 20),
    floor=st.floats(0, 1),
    extra=st.integers(1, 50),
)
def test_every_shape_rises_to_the_rate_then_falls_to_the_floor_and_stays(
    shape, warmup, decay, floor, extra
) -> None:
    total = warmup + decay + extra
    config = OptimizerConfig(
        lr=2.0, schedule=shape, warmup_steps=warmup, decay_steps=decay, floor=floor
    )
    check_schedule(config, total)
    got = rates(config, total, total + 5)
    assert got[:warmup] == [2.0 * (i + 1) / warmup for i in range(warmup)]
    assert got[warmup] == pytest.approx(2.0)
    assert all(a >= b for a, b in zip(got[warmup:], got[warmup + 1 :], strict=False))
    assert got[total:] == pytest.approx([2.0 * floor] * 5)
    if decay:
        assert got[warmup : total - decay] == [2.0] * (total - decay - warmup)


@pytest.mark.parametrize(("warmup", "decay", "total"), [(10, 0, 10), (3, 4, 6), (0, 9, 8)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_schedule_that_does_not_fit_is_refused_with_the_numbers(
    shape, warmup, decay, total
) -> None:
    config = OptimizerConfig(schedule=shape, warmup_steps=warmup, decay_steps=decay)
    with pytest.raises(RunError, match=f"over {total} steps.*warmup_steps {warmup} and decay"):
        check_schedule(config, total)
    check_schedule(OptimizerConfig(warmup_steps=warmup), total)  # a constant rate needs no end


def test_the_planned_total_is_the_first_target_unless_it_is_set() -> None:
    assert planned_total(OptimizerConfig(schedule="linear"), 70) == 70
    assert planned_total(OptimizerConfig(schedule="linear", total_steps=90), 70) == 90


def logged(folder) -> list[float]:
    return [r["lr"] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]


COSINE = {"optimizer.schedule": "cosine", "optimizer.warmup-steps": 2}


@pytest.mark.usefixtures("alone")
def test_steps_that_a_later_start_adds_do_not_bend_the_curve(tmp_path, text_folder, capsys) -> None:
    run(tmp_path / "a", text_folder, **COSINE)
    run(tmp_path / "a", text_folder, **COSINE)
    said = capsys.readouterr().out
    assert "the schedule ended at step 6: the rate stays at 0" in said
    config = OptimizerConfig(schedule="cosine", warmup_steps=2)
    assert logged(tmp_path / "a") == rates(config, 6, 12)


@pytest.mark.usefixtures("alone")
def test_a_longer_plan_is_said_with_what_it_does_to_the_next_step(
    tmp_path, text_folder, capsys
) -> None:
    run(tmp_path / "a", text_folder, **COSINE)
    capsys.readouterr()
    run(tmp_path / "a", text_folder, **COSINE | {"optimizer.total-steps": 12})
    said = capsys.readouterr().out
    assert "optimizer.total_steps: 0 -> 12" in said
    assert "the rate of the next step is 0.00196" in said
    assert "it was to be 0" in said
    config = OptimizerConfig(schedule="cosine", warmup_steps=2)
    assert logged(tmp_path / "a")[6:] == rates(config, 12, 12)[6:]
