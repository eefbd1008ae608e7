"""A trace holds the steps that were asked for, and what cannot be is refused."""

import json

import pytest
import torch
from moe_train.clock import StepClock
from moe_train.config import LogConfig
from moe_train.errors import RunError
from moe_train.profiling import StepProfiler
from runs import run


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_trace_holds_the_parts_of_each_layer_of_the_steps_asked_for(
    tmp_path, text_folder, capsys
) -> None:
    # Without validations in between, every forward pass is a training step's.
    flags = {"log__profile": "2:4", "train__eval-every": 0, "train__sample-bytes": 0}
    assert run(tmp_path / "a", text_folder, **flags) == 0
    folder = tmp_path / "a" / "profile"
    assert sorted(p.name for p in folder.iterdir()) == ["steps-2-4.json", "steps-2-4.txt"]
    events = json.loads((folder / "steps-2-4.json").read_text())["traceEvents"]
    named = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    for part in ("attention", "moe.route", "moe.experts", "moe.shared"):
        assert named.count(part) == 3 * 2  # steps and layers
    assert "moe.route" in (folder / "steps-2-4.txt").read_text()
    capsys.readouterr()
    # A run that goes on with the same flags is not refused for what is done already.
    assert run(tmp_path / "a", text_folder, **flags) == 0
    assert "step 2 of log.profile is done already" in capsys.readouterr().out


def test_steps_beyond_the_end_are_refused_before_the_first_step(
    tmp_path, text_folder, capsys
) -> None:
    assert run(tmp_path / "a", text_folder, log__profile="7:9") == 2
    assert "asks for steps 7 to 9, and this run ends at step 6" in capsys.readouterr().err
    assert not (tmp_path / "a" / "checkpoints").exists()


@pytest.mark.parametrize("flag", ["memory_snapshot", "nvtx"])
def test_what_needs_a_gpu_is_refused_without_one(tmp_path, flag) -> None:
    config = LogConfig(profile="" if flag == "nvtx" else "1:2", **{flag: True})
    with pytest.raises(RunError, match=f"{flag} needs a GPU, and this run is on cpu"):
        StepProfiler(config, tmp_path, torch.device("cpu"))


def test_a_run_that_ends_amid_the_steps_leaves_what_there_is(tmp_path) -> None:
    profiler = StepProfiler(LogConfig(profile="1:9"), tmp_path, torch.device("cpu"))
    profiler.before(1)
    torch.ones(3).sum()
    profiler.after(1)
    assert not (tmp_path / "profile").exists()
    profiler.close()
    profiler.close()
    assert "aten::sum" in (tmp_path / "profile" / "steps-1-9.txt").read_text()


def test_a_clock_adds_up_parts_and_gives_the_mean_of_steps(monkeypatch) -> None:
    times = iter([0.0, 1.0, 3.0, 4.0, 10.0, 11.0, 11.5])
    monkeypatch.setattr("moe_train.clock.time.perf_counter", lambda: next(times))
    clock = StepClock(torch.device("cpu"))
    clock.start()
    for name in ("data", "forward", "data"):
        clock.mark(name)
    clock.start()
    for name in ("data", "forward"):
        clock.mark(name)
    assert clock.read() == {"data": (1 + 1 + 1) / 2, "forward": (2 + 0.5) / 2}
    assert clock.read() == {}
