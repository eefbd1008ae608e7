"""A run refuses in one line what it cannot begin or go on from, and leaves what was there."""

import os
import shutil

import numpy as np
import pytest
import torch
from moe_train.trainer import Trainer
from runs import refused, run, tensors

pytestmark = pytest.mark.usefixtures("alone")  # these runs are of one rank


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model__num_experts": 8}, "model.num_experts: 4 -> 8"),
        ({"model__dim": 32}, "model.dim: 16 -> 32"),
        ({"train__dtype": "float64"}, "train.dtype: 'float32' -> 'float64'"),
        ({"data__sequence_length": 8}, "data.sequence_length: 16 -> 8"),
        ({"data__seed": 1}, "data.seed: 0 -> 1"),
        ({"routing__bias": False}, "routing.bias: True -> False"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path, text_folder, capsys, settings, named
) -> None:
    run(tmp_path / "a", text_folder)
    capsys.readouterr()
    settings = {k.replace("_", "-").replace("--", "__"): v for k, v in settings.items()}
    refused(capsys, run(tmp_path / "a", text_folder, **settings), named, "run_dir")


def test_two_processes_never_share_a_folder(tmp_path, text_folder, capsys, monkeypatch) -> None:
    codes = []
    original = Trainer.step

    def step(trainer: Trainer):
        if not codes:
            codes.append(run(tmp_path / "a", text_folder))
        return original(trainer)

    monkeypatch.setattr(Trainer, "step", step)
    assert run(tmp_path / "a", text_folder) == 0
    refused(capsys, codes[0], "another process is running in")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--mesh.epp", "2"], ["--mesh.epp", "--mesh.ep"]),
        (["--model.num-expert", "2"], ["num-expert", "num"]),
        (["--mesh.tp", "2"], ["tp=2", "tensor parallelism"]),
        (["--mesh.ep", "3"], ["ep=3", "1"]),
        (["--nproc", "3"], ["batch_size 4", "3 ranks"]),
        (["--train.steps", "many"], ["train.steps", "many"]),
        (["--data.path", "/nowhere/at/all"], ["data.path /nowhere/at/all is not a folder"]),
        (["--data.suffix", ".none"], ["non-empty files named *.none"]),
        (["--data.sequence-length", "9999999"], ["sequence_length 9999999"]),
        (["--run-dir", "/proc/here"], ["run_dir /proc/here cannot be written"]),
        (["--train.device", "cuda"], ["GPU"]),
        (["--model.vocab-size", "100"], ["vocab_size", "256", "100"]),
        (["--optimizer.lr", "inf"], ["lr must be positive, got inf"]),
        (["--train.steps", "1" + "0" * 400], ["steps must be positive"]),
        (["--train.batch-size", "100000000001"], ["batch_size must be at most"]),
        (["--train.threads", "1000000"], ["train.threads 1000000", "cores"]),
        (["--data.suffix", "**"], ["non-empty files named"]),
        (["--run-dir", "/"], ["lies inside run_dir /"]),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_nothing(
    tmp_path, text_folder, capsys, words, parts
) -> None:
    if words[1] == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code = run(tmp_path / "a", text_folder, *words)
    refused(capsys, code, *parts)
    assert not (tmp_path / "a" / "checkpoints").exists()


@pytest.mark.parametrize("name", ["config.toml", "environment.json", "sample.txt", "report.html"])
def test_a_full_disk_is_said_with_the_file(tmp_path, text_folder, capsys, name) -> None:
    run(tmp_path / "a", text_folder)
    before = tensors(tmp_path / "a", 6)
    partial = tmp_path / "a" / f".{name}.partial"
    partial.unlink(missing_ok=True)
    partial.symlink_to("/dev/full")
    capsys.readouterr()
    if name == "report.html":
        partial.unlink()
        (tmp_path / "a" / "report.html").unlink()
        (tmp_path / "a" / "report.html").mkdir()  # the report cannot take its place
        assert run(tmp_path / "a", text_folder) == 1
        refused(capsys, 1, "report.html")
    else:
        refused(capsys, run(tmp_path / "a", text_folder), "No space left on device", name)
    assert all(np.array_equal(v, before[k]) for k, v in tensors(tmp_path / "a", 6).items())


def test_a_checkpoint_that_cannot_be_saved_is_said_and_the_earlier_stand(
    tmp_path, text_folder, capsys, monkeypatch
) -> None:
    run(tmp_path / "a", text_folder)
    before = tensors(tmp_path / "a", 6)
    capsys.readouterr()
    original = os.fsync

    def full(descriptor: int) -> None:
        if "checkpoints" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    refused(capsys, run(tmp_path / "a", text_folder), "No space left on device")
    monkeypatch.undo()
    assert all(np.array_equal(v, before[k]) for k, v in tensors(tmp_path / "a", 6).items())
    assert run(tmp_path / "a", text_folder) == 0


def test_damaged_metrics_are_said(tmp_path, text_folder, capsys) -> None:
    run(tmp_path / "a", text_folder)
    metrics = tmp_path / "a" / "metrics.jsonl"
    metrics.write_text("damaged\n" + metrics.read_text())
    capsys.readouterr()
    refused(capsys, run(tmp_path / "a", text_folder), "metrics.jsonl:1", "move the file away")
    metrics.unlink()
    assert run(tmp_path / "a", text_folder) == 0


def test_ranks_of_another_launcher_are_not_multiplied(
    tmp_path, text_folder, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    refused(capsys, run(tmp_path / "a", text_folder, "--nproc", "4"), "nproc 4", "one of 1")


def test_the_mark_of_a_lost_checkpoint_is_enough_to_refuse(tmp_path, text_folder, capsys) -> None:
    run(tmp_path / "a", text_folder)
    for path in (tmp_path / "a" / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    (tmp_path / "a" / "metrics.jsonl").unlink()
    capsys.readouterr()
    code = run(tmp_path / "a", text_folder)
    assert code == 2
    assert "no valid checkpoint is left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"RANK": "1"}, "RANK must be in 0..WORLD_SIZE-1"),
        ({"RANK": "x"}, "whole numbers"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(
    tmp_path, text_folder, capsys, monkeypatch, names, said
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    refused(capsys, run(tmp_path / "a", text_folder), said)


def test_a_run_whose_gradients_stay_bad_gives_up(
    tmp_path, text_folder, capsys, monkeypatch
) -> None:
    original = Trainer.step
    monkeypatch.setattr(
        Trainer, "step", lambda trainer: original(trainer)._replace(skipped=torch.tensor(True))
    )
    code = run(tmp_path / "a", text_folder, **{"train.steps": 100})
    refused(capsys, code, "not finite in 20 steps in a row")
