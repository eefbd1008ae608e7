"""Saves in the background are those in the foreground, and none is lost or said too early."""

import os
import signal
import threading
import time
from dataclasses import replace
from unittest import mock

import moe_ckpt
import moe_train.run as job
import numpy as np
import pytest
import torch.distributed as dist
from moe_ckpt import background
from moe_parallel import Mesh, plan_mesh
from moe_train.metrics import read_metrics
from moe_train.ranks import RankInfo
from moe_train.trainer import Trainer
from moe_train.votes import Votes
from runs import losses, refused, run, tensors

pytestmark = pytest.mark.usefixtures("alone")


def saved(folder) -> list[int]:
    return [r["step"] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "save"]


def test_both_ways_of_saving_leave_the_same_checkpoints(tmp_path, text_folder) -> None:
    for name, way in (("a", True), ("b", False)):
        assert run(tmp_path / name, text_folder, **{"train.async-save": way}) == 0
        assert saved(tmp_path / name) == [3, 6]
        for step in (3, 6):
            moe_ckpt.verify(tmp_path / name / "checkpoints" / f"step-{step:08d}")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    for step in (3, 6):
        a, b = (tensors(tmp_path / name, step) for name in ("a", "b"))
        assert a.keys() == b.keys()
        assert all(a[key].tobytes() == b[key].tobytes() for key in a)


@pytest.mark.parametrize(("first", "want"), [(0, [3, 6]), (1, [1, 3, 6]), (3, [3, 6])])
def test_an_early_checkpoint_is_saved_after_every_start(tmp_path, text_folder, first, want) -> None:
    for start in range(2):
        assert run(tmp_path / "a", text_folder, **{"train.save-first": first}) == 0
        assert saved(tmp_path / "a") == want + [6 + step for step in want] * start


def test_training_goes_on_while_a_save_runs_and_the_end_waits_for_it(
    tmp_path, text_folder, monkeypatch
) -> None:
    steps, written = [], threading.Event()
    original, plain = background.save_views, Trainer.step

    def slow(together, root, call):
        if call.step == 3:
            deadline = time.monotonic() + 60
            while len(steps) < 5 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(steps) >= 5
        else:
            time.sleep(0.3)
            written.set()
        return original(together, root, call)

    def step(trainer):
        steps.append(trainer.steps_done)
        return plain(trainer)

    monkeypatch.setattr(background, "save_views", slow)
    monkeypatch.setattr(Trainer, "step", step)
    assert run(tmp_path / "a", text_folder) == 0
    assert written.is_set()
    assert saved(tmp_path / "a") == [3, 6]
    assert np.isfinite(tensors(tmp_path / "a", 6)["head", "master"]).all()


@pytest.mark.parametrize("when", [3, 6])
def test_a_save_that_fails_ends_the_run_at_the_next_step_and_is_never_called_safe(
    tmp_path, text_folder, capsys, monkeypatch, when
) -> None:
    original = background.save_views

    def full(together, root, call):
        if call.step == when:
            raise OSError(28, "No space left on device")
        return original(together, root, call)

    monkeypatch.setattr(background, "save_views", full)
    code = run(tmp_path / "a", text_folder, **{"train.steps": 6 if when == 6 else 100_000})
    refused(capsys, code, "No space left on device")
    assert code == 1
    assert saved(tmp_path / "a") == [3] * (when == 6)
    assert losses(tmp_path / "a")[-1][0] < 100
    assert not (tmp_path / "a" / "result.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_is_said_when_its_checkpoint_is_safe(
    tmp_path, text_folder, capsys, monkeypatch, number
) -> None:
    original, plain = background.save_views, Trainer.step

    def slow(*arguments):
        time.sleep(0.3)
        return original(*arguments)

    def step(trainer):
        if trainer.steps_done == 3:
            os.kill(os.getpid(), number)
        return plain(trainer)

    monkeypatch.setattr(background, "save_views", slow)
    monkeypatch.setattr(Trainer, "step", step)
    assert run(tmp_path / "a", text_folder) == 0
    assert f"stopped by {number.name} after step 4 of 6; saved" in capsys.readouterr().out
    assert saved(tmp_path / "a")[-1] == 4
    assert moe_ckpt.find_latest(tmp_path / "a" / "checkpoints").step == 4


def vote(group, ballots: list[list[tuple[bool, bool]]]) -> list[list[bool]]:
    votes = Votes(Mesh.create(plan_mesh(3), group=group))
    got = [votes.cast(mine) for mine in ballots[dist.get_rank(group)]]
    return [*got, votes.settle(), votes.settle()]


def test_what_one_rank_says_all_hear_one_step_later(pool) -> None:
    quiet = [(False, False)] * 3
    one, other = [*quiet], [*quiet]
    one[0], other[2] = (True, False), (False, True)
    want = [[False, False], [True, False], [False, False], [False, True], []]
    assert pool.run(vote, 3, [quiet, one, other]) == [want] * 3


def test_a_rank_alone_hears_itself_at_once() -> None:
    votes = Votes(Mesh.create(plan_mesh(1)))
    assert votes.cast([True, False]) == [True, False]
    assert votes.settle() == []


def start_with_a_full_disk(group, config, full_on: int) -> str:
    """Run with a disk of one rank that is full, and return what is raised here."""
    rank, original = dist.get_rank(group), os.fsync

    def fsync(descriptor: int) -> None:
        if rank == full_on and "checkpoints" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        original(descriptor)

    with mock.patch.object(job, "join"), mock.patch.object(os, "fsync", fsync):
        try:
            job.run(config, RankInfo(rank, rank, dist.get_world_size(group)))
        except Exception as error:
            return f"{error} {getattr(error, '__notes__', '')}"
    return ""


def test_a_disk_that_is_full_on_one_rank_ends_all_and_the_run_goes_on_from_before(
    pool, tiny_config
) -> None:
    train = replace(tiny_config.train, steps=6, save_every=3)
    config = replace(tiny_config, train=train)
    assert pool.run(start_with_a_full_disk, 4, config, -1) == [""] * 4
    longer = replace(config, train=replace(train, steps=60))
    for said in pool.run(start_with_a_full_disk, 4, longer, 0):
        assert "No space left on device" in said
    assert losses(config.run_dir)[-1][0] < 20
    assert moe_ckpt.find_latest(config.run_dir / "checkpoints").step == 6
    assert pool.run(start_with_a_full_disk, 4, config, -1) == [""] * 4
    assert [step for step, _ in losses(config.run_dir)] == list(range(1, 13))


def test_a_validation_before_the_first_step_is_of_the_untrained_model(
    tmp_path, text_folder
) -> None:
    for _ in range(2):  # once in a run, not at every start
        assert run(tmp_path / "a", text_folder, **{"train.eval-first": True}) == 0
    records = [r for r in read_metrics(tmp_path / "a" / "metrics.jsonl") if r["kind"] == "eval"]
    assert [r["step"] for r in records] == [0, 2, 4, 6, 8, 10, 12]
    assert records[0]["loss"] == pytest.approx(np.log(256))
