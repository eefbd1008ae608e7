"""A run begins once, goes on from what it finds, and refuses what it cannot go on from."""

import json
import os
import shutil
import signal
from pathlib import Path

import moe_ckpt
import numpy as np
import pytest
import torch
from moe_train.cli import command
from moe_train.metrics import read_metrics
from moe_train.trainer import Trainer

SIZES = {
    "model.dim": 16, "model.num-layers": 2, "model.num-heads": 2, "model.num-kv-heads": 1,
    "model.num-experts": 4, "model.expert-dim": 8, "model.shared-dim": 8, "train.steps": 6,
    "train.batch-size": 4, "train.eval-sequences": 8, "train.sample-bytes": 4,
    "train.save-every": 3, "train.eval-every": 2, "train.log-every": 1, "train.threads": 1,
    "train.keep": 9, "train.device": "cpu", "data.sequence-length": 16, "routing.bias": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> None:
    """These runs are of one rank, whatever started the tests."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run(folder: Path, text: Path, *extra: str, **settings) -> int:
    flags = SIZES | {k.replace("__", "."): v for k, v in settings.items()}
    words = [w for key, value in flags.items() for w in (f"--{key}", str(value))]
    return command(["run", "--run-dir", str(folder), "--data.path", str(text), *words, *extra])


def tensors(folder: Path, step: int) -> dict[tuple[str, str], np.ndarray]:
    checkpoint = moe_ckpt.open_checkpoint(folder / "checkpoints" / f"step-{step:08d}")
    return {(n, k): checkpoint.read(n, k) for n in checkpoint.names for k in checkpoint.kinds(n)}


def losses(folder: Path) -> list[tuple[int, float]]:
    records = read_metrics(folder / "metrics.jsonl")
    return [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]


def damage(folder: Path, step: int, what: str = "manifest.json") -> None:
    [file, *_] = sorted((folder / "checkpoints" / f"step-{step:08d}").rglob(what))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


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


def refused(capsys, code: int, *parts: str) -> None:
    error = capsys.readouterr().err
    assert code != 0
    assert error.count("\n") == 1, error
    for part in parts:
        assert part in error


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


def test_damaged_metrics_are_said(tmp_path, text_folder, capsys) -> None:
    run(tmp_path / "a", text_folder)
    metrics = tmp_path / "a" / "metrics.jsonl"
    metrics.write_text("damaged\n" + metrics.read_text())
    capsys.readouterr()
    refused(capsys, run(tmp_path / "a", text_folder), "metrics.jsonl:1", "move the file away")
    metrics.unlink()
    assert run(tmp_path / "a", text_folder) == 0


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


def test_a_run_whose_gradients_stay_bad_gives_up(
    tmp_path, text_folder, capsys, monkeypatch
) -> None:
    original = Trainer.step
    monkeypatch.setattr(
        Trainer, "step", lambda trainer: original(trainer)._replace(skipped=torch.tensor(True))
    )
    code = run(tmp_path / "a", text_folder, **{"train.steps": 100})
    refused(capsys, code, "not finite in 20 steps in a row")


def test_ranks_of_another_launcher_are_not_multiplied(
    tmp_path, text_folder, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    refused(capsys, run(tmp_path / "a", text_folder, "--nproc", "4"), "nproc 4", "one of 1")


def test_unknown_command_and_help(capsys) -> None:
    assert command(["fly"]) == 2
    assert "unknown command 'fly'" in capsys.readouterr().err
    assert command([]) == 0
    assert "moe-train run" in capsys.readouterr().out


def test_falling_back_to_an_older_checkpoint_looks_at_its_own_text(
    tmp_path, text_folder, capsys
) -> None:
    run(tmp_path / "a", text_folder, **{"train.steps": 3})
    (text_folder / "file3.py").write_text("changed\n" * 50)
    run(tmp_path / "a", text_folder, "--data.allow-changed", "True", **{"train.steps": 3})
    damage(tmp_path / "a", 6, "c.*")
    capsys.readouterr()
    refused(capsys, run(tmp_path / "a", text_folder), "the text is not the one", "SHA-256")


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


def test_odd_names_of_files_are_text_like_any_other(tmp_path, text_folder) -> None:
    Path(os.fsdecode(os.fsencode(text_folder) + b"/caf\xe9.py")).write_text("x = 1\n" * 50)
    assert run(tmp_path / "a", text_folder) == 0


def test_the_number_of_parameters_is_that_of_the_whole_model(tmp_path, text_folder, capsys) -> None:
    run(tmp_path / "a", text_folder)
    shapes = {name: values.shape for (name, kind), values in tensors(tmp_path / "a", 6).items()}
    weights = sum(int(np.prod(s)) for name, s in shapes.items() if "router_bias" not in name)
    assert f"{weights:,} parameters" in capsys.readouterr().out
