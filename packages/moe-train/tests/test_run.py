"""A run begins once, goes on from what it finds, and leaves what it promises."""

import json
import os
import shutil
import signal
from pathlib import Path

import moe_ckpt
import numpy as np
import pytest
import torch
from moe_train.metrics import read_metrics
from moe_train.trainer import Trainer
from runs import damage, losses, refused, run, tensors

pytestmark = pytest.mark.usefixtures("alone")  # these runs are of one rank


@pytest.mark.parametrize(
    ("dtype", "length"),
    [("float32", 16), ("float64", 16), ("float32", 400)],  # the last: 23 sequences an epoch
)
def test_two_runs_are_one_longer_run_bit_for_bit(
    tmp_path, text_folder, capsys, dtype, length
) -> None:
    settings = {"train__dtype": dtype, "data__sequence-length": length}
    for _ in range(2):
        assert run(tmp_path / "a", text_folder, **settings) == 0
    assert run(tmp_path / "b", text_folder, train__steps=12, **settings) == 0
    said = capsys.readouterr().out
    assert "found step 6" in said
    assert "continuing to step 12" in said
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    a, b = tensors(tmp_path / "a", 12), tensors(tmp_path / "b", 12)
    assert a.keys() == b.keys()
    assert all(a[key].tobytes() == b[key].tobytes() for key in a)
    assert np.abs(a["layers.1.moe.router_bias", "buffer"]).max() > 0


def test_a_run_leaves_everything_that_it_promises(tmp_path, text_folder, capsys) -> None:
    assert run(tmp_path / "a", text_folder) == 0
    said = capsys.readouterr().out
    folder = tmp_path / "a"
    assert "a bigram table reaches" in said
    assert "a trigram table reaches" in said
    assert "no checkpoint" in said
    result = json.loads((folder / "result.json").read_text())
    evals = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "eval"]
    assert [r["step"] for r in evals] == [2, 4, 6]
    assert result["validation_loss"] == evals[-1]["loss"]
    assert f"validation loss {evals[-1]['loss']:.4f}" in said
    assert (folder / "sample.txt").read_text().startswith("def ")
    assert "num_experts = 4" in (folder / "config.toml").read_text()
    page = (folder / "report.html").read_text()
    assert page.count("<svg") >= 4
    assert set(json.loads((folder / "references.json").read_text())) == {"bigram", "trigram"}
    moe_ckpt.verify(folder / "checkpoints" / "step-00000006")


def test_an_interrupted_run_goes_on_to_its_own_end(tmp_path, text_folder, monkeypatch) -> None:
    original = Trainer.step

    def step(trainer: Trainer):
        if trainer.steps_done == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        assert run(tmp_path / "a", text_folder) == 0
    assert [step for step, _ in losses(tmp_path / "a")] == [1, 2, 3, 4]
    assert (tmp_path / "a" / "report.html").exists()
    assert run(tmp_path / "a", text_folder) == 0
    assert run(tmp_path / "b", text_folder) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_work_after_the_last_checkpoint_is_done_again(tmp_path, text_folder, monkeypatch) -> None:
    original = Trainer.step

    def step(trainer: Trainer):
        if trainer.steps_done == 5:
            raise OSError("the machine went away")
        return original(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        assert run(tmp_path / "a", text_folder) == 1
    assert run(tmp_path / "a", text_folder) == 0
    assert run(tmp_path / "b", text_folder) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_other_text_is_refused_and_the_way_on_works(tmp_path, text_folder, capsys) -> None:
    run(tmp_path / "a", text_folder)
    capsys.readouterr()
    (text_folder / "file3.py").write_text("changed\n" * 50)
    before = tensors(tmp_path / "a", 6)
    code = run(tmp_path / "a", text_folder)
    refused(capsys, code, "the text is not the one", "SHA-256", "--data.allow-changed True")
    assert all(np.array_equal(v, before[k]) for k, v in tensors(tmp_path / "a", 6).items())
    assert run(tmp_path / "a", text_folder, "--data.allow-changed", "True") == 0
    assert "SHA-256" in capsys.readouterr().out
    assert losses(tmp_path / "a")[-1][0] == 12


def test_changes_that_are_allowed_are_said(tmp_path, text_folder, capsys) -> None:
    run(tmp_path / "a", text_folder)
    assert run(tmp_path / "a", text_folder, "--optimizer.lr", "0.001", "--routing.z", "0.1") == 0
    said = capsys.readouterr().out
    assert "optimizer.lr: 0.003 -> 0.001" in said
    assert "routing.z: 0.0 -> 0.1" in said


@pytest.mark.parametrize("what", ["manifest.json", "c.*"])
def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path, text_folder, capsys, what) -> None:
    run(tmp_path / "a", text_folder)
    damage(tmp_path / "a", 6, what)
    capsys.readouterr()
    assert run(tmp_path / "a", text_folder) == 0
    said = capsys.readouterr().out
    assert "found step 3" in said
    assert "passed over" in said
    assert "step-00000006" in said
    assert run(tmp_path / "b", text_folder) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.parametrize("lost", ["damaged", "deleted"])
def test_a_run_that_lost_its_checkpoints_never_begins_anew(
    tmp_path, text_folder, capsys, lost
) -> None:
    run(tmp_path / "a", text_folder)
    if lost == "damaged":
        damage(tmp_path / "a", 3)
        damage(tmp_path / "a", 6)
    else:
        shutil.rmtree(tmp_path / "a" / "checkpoints")
    capsys.readouterr()
    code = run(tmp_path / "a", text_folder)
    assert code == 2
    error = capsys.readouterr().err
    assert "no valid checkpoint is left" in error
    assert "run_dir" in error


def test_frozen_bias_stays_in_use(tmp_path, text_folder) -> None:
    run(tmp_path / "a", text_folder, **{"routing.bias-rate": 0.05})
    run(tmp_path / "a", text_folder, **{"routing.bias-rate": 0})
    before, after = tensors(tmp_path / "a", 6), tensors(tmp_path / "a", 12)
    key = ("layers.0.moe.router_bias", "buffer")
    assert np.array_equal(before[key], after[key])
    run(tmp_path / "b", text_folder, **{"routing.bias-rate": 0, "train.steps": 12})
    assert losses(tmp_path / "a")[6:] != losses(tmp_path / "b")[6:]


def test_a_run_inside_its_text_does_not_read_itself(tmp_path, text_folder) -> None:
    folder = text_folder / "run"
    assert run(folder, text_folder, "--data.suffix", "") == 0
    assert run(folder, text_folder, "--data.suffix", "") == 0
    assert losses(folder)[-1][0] == 12


def test_every_skipped_step_is_counted(tmp_path, text_folder, monkeypatch) -> None:
    original = Trainer.step

    def step(trainer: Trainer):
        result = original(trainer)
        odd = torch.tensor(trainer.steps_done % 3 == 1)
        return result._replace(skipped=odd, num_bad=torch.tensor(2.0))

    monkeypatch.setattr(Trainer, "step", step)
    run(tmp_path / "a", text_folder, **{"train.log-every": 4, "train.steps": 12})
    records = [r for r in read_metrics(tmp_path / "a" / "metrics.jsonl") if r["kind"] == "train"]
    assert len(records) < 12
    assert sum(r["skipped"] for r in records) == 4
    assert sum(r["unrouted"] for r in records) == 24
    assert "4 skipped" in (tmp_path / "a" / "report.html").read_text()


def test_falling_back_to_an_older_checkpoint_looks_at_its_own_text(
    tmp_path, text_folder, capsys
) -> None:
    run(tmp_path / "a", text_folder, **{"train.steps": 3})
    (text_folder / "file3.py").write_text("changed\n" * 50)
    run(tmp_path / "a", text_folder, "--data.allow-changed", "True", **{"train.steps": 3})
    damage(tmp_path / "a", 6, "c.*")
    capsys.readouterr()
    refused(capsys, run(tmp_path / "a", text_folder), "the text is not the one", "SHA-256")


def test_odd_names_of_files_are_text_like_any_other(tmp_path, text_folder) -> None:
    Path(os.fsdecode(os.fsencode(text_folder) + b"/caf\xe9.py")).write_text("x = 1\n" * 50)
    assert run(tmp_path / "a", text_folder) == 0


def test_the_number_of_parameters_is_that_of_the_whole_model(tmp_path, text_folder, capsys) -> None:
    run(tmp_path / "a", text_folder)
    shapes = {name: values.shape for (name, kind), values in tensors(tmp_path / "a", 6).items()}
    weights = sum(int(np.prod(s)) for name, s in shapes.items() if "router_bias" not in name)
    assert f"{weights:,} parameters" in capsys.readouterr().out
