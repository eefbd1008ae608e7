"""One run in a tracker is one run, whatever happens between its starts."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from moe_train.config import LogConfig, RunConfig
from moe_train.errors import RunError
from moe_train.metrics import read_metrics
from moe_train.sinks import check_sinks, numbers, open_sinks, run_id
from moe_train.trainer import Trainer
from runs import run


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


class Tracker:
    """What of Weights & Biases a run uses; takes no step at or before one it has had."""

    def __init__(self) -> None:
        self.starts: list[dict] = []
        self.steps: dict[str, dict[int, dict]] = {}
        self.finished = 0

    def init(self, **settings) -> "Tracker":
        self.starts.append(settings)
        self.now = self.steps.setdefault(settings["id"], {})
        return self

    def log(self, values: dict, step: int) -> None:
        if step >= max(self.now, default=0):
            self.now.setdefault(step, {}).update(values)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def tracker(monkeypatch) -> Tracker:
    module, made = ModuleType("wandb"), Tracker()
    module.__spec__ = ModuleSpec("wandb", None)
    module.init = made.init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def crash_at(monkeypatch, step: int):
    original = Trainer.step

    def crash(trainer: Trainer):
        if trainer.steps_done == step:
            raise OSError("the machine went away")
        return original(trainer)

    monkeypatch.setattr(Trainer, "step", crash)


def test_a_run_that_crashed_and_went_on_is_one_run_with_each_step_once(
    tmp_path, text_folder, monkeypatch, tracker
) -> None:
    flags = {"log__wandb": True, "log__wandb-project": "mine", "log__tensorboard": True}
    with monkeypatch.context() as patch:
        crash_at(patch, 5)  # steps 4 and 5 are done again
        assert run(tmp_path / "a", text_folder, **flags) == 1
    assert run(tmp_path / "a", text_folder, **flags) == 0
    records = read_metrics(tmp_path / "a" / "metrics.jsonl")
    train = {r["step"]: r for r in records if r["kind"] == "train"}
    # Weights & Biases
    assert [s["id"] for s in tracker.starts] == [run_id(tmp_path / "a")] * 2
    assert {s["project"] for s in tracker.starts} == {"mine"}
    assert tracker.starts[0]["resume"] == "allow"
    assert tracker.starts[0]["config"]["model"]["num_experts"] == 4
    assert tracker.finished == 2
    [steps] = tracker.steps.values()
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    for step, values in steps.items():
        assert values["train/loss"] == train[step]["loss"]
        assert values["router/distance/layer_1"] == train[step]["distance"][1]
        assert len(values) < 60
    # TensorBoard
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    events = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [event.step for event in scalars] == [1, 2, 3, 4, 5, 6]
    for event in scalars:
        assert event.value == pytest.approx(train[event.step]["loss"], rel=1e-6)
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 4, 6]


def test_numbers_leave_out_what_grows_with_experts_and_what_is_no_number() -> None:
    record = {
        "kind": "train", "step": 4, "loss": 1.0, "load": [[0.5, 0.5]], "labels": ["forced"],
        "alarms": ["layer 0 starved: 1", "layer 0 collapse: 2"], "parts": {"data": 0.1},
        "distance": [0.25],
    }  # fmt: skip
    assert numbers(record) == {
        "train/loss": 1.0, "router/alarms": 2, "parts/data": 0.1, "router/distance/layer_0": 0.25,
    }  # fmt: skip


def test_a_missing_extra_is_refused_before_any_work(tmp_path, text_folder, monkeypatch, capsys):
    monkeypatch.setattr("moe_train.sinks.importlib.util.find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(RunError, match=rf"install moe-train\[{name}\]"):
            check_sinks(LogConfig(**{name: True}))
        assert run(tmp_path / "a", text_folder, **{f"log__{name}": True}) == 2
        assert f"log.{name} needs the package {name}" in capsys.readouterr().err
        assert not (tmp_path / "a" / "metrics.jsonl").exists()
    check_sinks(LogConfig())


def test_a_tracker_that_does_not_start_ends_the_run_in_one_line(
    tmp_path, text_folder, monkeypatch, tracker, capsys
) -> None:
    def fail(**_):
        raise OSError("no network")

    monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    assert run(tmp_path / "a", text_folder, log__wandb=True) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "does not start (no network); log in, or set log.wandb_mode to offline" in error


def test_the_id_stays_with_the_folder_and_differs_between_folders(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    first = [run_id(folder) for folder in folders]
    assert first == [run_id(folder) for folder in folders]
    assert len(set(first)) == 2
    moved = folders[0].rename(tmp_path / "moved")
    assert run_id(moved) == first[0]
    assert open_sinks(RunConfig(), moved, 0) == []
