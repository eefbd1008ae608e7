"""The command as a user runs it: several ranks, signals, death, and going on after them."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import cli_run
import pytest
from moe_ckpt import find_latest, open_checkpoint, verify
from moe_train.metrics import read_metrics

KILLS = int(os.environ.get("MOE_TEST_KILLS", "3"))


def run(*arguments: str, **settings: object) -> str:
    code, out, err = cli_run.finish(cli_run.start(cli_run.command(*arguments, **settings)))
    assert code == 0, out + err
    return out


def test_a_run_of_four_ranks_goes_on_on_one_and_on_two(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, train__steps=18)
    out = run(parts, "--nproc", "4", "--mesh.ep", "2", train__steps=6)
    assert "4 ranks" in out
    assert "found step 6" in run(parts, train__steps=6)
    out = run(parts, "--nproc", "2", "--mesh.ep", "2", train__steps=6)
    assert "found step 12" in out
    assert cli_run.losses(parts) == pytest.approx(cli_run.losses(whole), rel=1e-9)
    ours, theirs = (open_checkpoint(find_latest(f / "checkpoints").path) for f in (parts, whole))
    assert ours.names == theirs.names
    for name in ours.names:
        for kind in ours.kinds(name):
            got, want = ours.read(name, kind), theirs.read(name, kind)
            assert got == pytest.approx(want, rel=1e-6, abs=1e-9), (name, kind)


def test_the_torchrun_form_is_the_same_run(tmp_path: Path) -> None:
    run(tmp_path / "a", "--nproc", "2", "--mesh.ep", "2", train__steps=4)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    module = cli_run.command(tmp_path / "b", "--mesh.ep", "2", train__steps=4)[1:]
    code, out, err = cli_run.finish(cli_run.start([*torchrun, *module]))
    assert code == 0, out + err
    assert cli_run.losses(tmp_path / "a") == cli_run.losses(tmp_path / "b")


def steps_of(folder: Path) -> set[int]:
    metrics = folder / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []
    return {record["step"] for record in records if record["kind"] == "train"}


def wait_for_step(folder: Path, step: int, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while step not in steps_of(folder):
        assert time.monotonic() < deadline, f"no step {step} within {timeout} s"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_all(pid: int) -> None:
    """Kill a run and its ranks at once, as a machine that loses power does."""
    for process in [*children(pid), pid]:
        os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "ranks"),
    [(signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGTERM, 1), (signal.SIGUSR1, 2)],
)
def test_a_signal_saves_and_ends_the_run(tmp_path: Path, number, ranks) -> None:
    arguments = cli_run.command(tmp_path, "--nproc", str(ranks), train__steps=100_000)
    process = cli_run.start(arguments)
    wait_for_step(tmp_path, 3)
    os.kill(process.pid, number)
    code, out, err = cli_run.finish(process, timeout=60)
    assert code == 0, out + err
    assert "saved" in out
    assert "Traceback" not in err
    assert find_latest(tmp_path / "checkpoints").step == len(cli_run.losses(tmp_path)) >= 3


EVERYTHING = {
    "train__ema": 0.9, "train__skip_spikes": 4.0, "train__spike_window": 6, "routing__bias": True,
    "optimizer__schedule": "cosine", "optimizer__total_steps": 300, "optimizer__floor": 0.1,
}  # fmt: skip
"""State of every kind that a run can have, to be lost at a restart."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_killing_a_run_at_any_moment_loses_no_committed_checkpoint(tmp_path: Path, ranks) -> None:
    moments = random.Random(ranks)
    committed = 0
    settings = EVERYTHING | {"train__steps": 100_000, "train__save_every": 5}
    words = ["--nproc", str(ranks), "--mesh.ep", str(ranks)]
    for _ in range(KILLS):
        arguments = cli_run.command(tmp_path, *words, **settings)
        process = cli_run.start(arguments)
        wait_for_step(tmp_path, committed + 1 + moments.randrange(12))
        time.sleep(moments.random() * 0.2)
        kill_all(process.pid)
        cli_run.finish(process)
        found = find_latest(tmp_path / "checkpoints")
        if found is None:
            assert committed == 0
            continue
        verify(found.path)
        assert found.step >= committed
        committed = found.step
    assert committed > 0
    introduced = tmp_path / "environment.json"
    introduced.unlink()
    process = cli_run.start(cli_run.command(tmp_path, *words, **settings))
    while not introduced.exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    code, out, err = cli_run.finish(process)
    assert code == 0, out + err
    assert f"found step {committed}" in out
    disturbed = cli_run.losses(tmp_path)
    assert len(disturbed) > committed
    steps = len(disturbed)
    run(tmp_path / "undisturbed", *words, **EVERYTHING | {"train__steps": steps})
    assert disturbed == cli_run.losses(tmp_path / "undisturbed")
    ours, theirs = (
        open_checkpoint(folder / "checkpoints" / f"step-{steps:08d}")
        for folder in (tmp_path, tmp_path / "undisturbed")
    )
    assert ours.names == theirs.names
    for name in ours.names:
        assert set(ours.kinds(name)) == set(theirs.kinds(name))
        for kind in ours.kinds(name):
            assert ours.read(name, kind).tobytes() == theirs.read(name, kind).tobytes()
    for key in ("step_count", "samples_seen", "losses", "tokens"):
        assert ours.state[key] == theirs.state[key]


def test_a_rank_that_dies_ends_the_others_and_is_named(tmp_path: Path) -> None:
    process = cli_run.start(cli_run.command(tmp_path, "--nproc", "2", train__steps=100_000))
    wait_for_step(tmp_path, 2)
    ranks = {}
    for child in children(process.pid):
        pairs = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks[dict(p.split(b"=", 1) for p in pairs if b"=" in p).get(b"RANK")] = int(child)
    os.kill(ranks[b"1"], signal.SIGKILL)
    code, _, err = cli_run.finish(process, timeout=60)
    assert code != 0
    assert "rank 1" in err


def test_refusals_are_said_once_for_all_ranks(tmp_path: Path) -> None:
    arguments = cli_run.command(tmp_path / "a", "--nproc", "4", "--mesh.ep", "3")
    code, out, err = cli_run.finish(cli_run.start(arguments))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "ep=3" in err


FAULTY = """
import os, sys
from moe_train.cli import command
from moe_train.trainer import Trainer
original = Trainer.step
def step(trainer):
    if os.environ["RANK"] == "1" and trainer.steps_done == 2:
        raise {error}
    return original(trainer)
Trainer.step = step
sys.exit(command(["run", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("error", ["OSError(5, 'the disk of rank 1')", "KeyError('expert 3')"])
def test_an_error_on_one_rank_ends_all_and_is_shown(tmp_path: Path, error: str) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(error=error))
    starter = (
        "import sys; from moe_train.launch import launch; "
        f"sys.exit(launch(sys.argv[1:], 2, command=[sys.executable, {str(script)!r}]))"
    )
    words = cli_run.command(tmp_path / "a", "--mesh.ep", "2", train__steps=100_000)[4:]
    begin = time.monotonic()
    code, _, err = cli_run.finish(cli_run.start([sys.executable, "-c", starter, *words]))
    assert code == 1
    assert time.monotonic() - begin < 60
    assert error.split("'")[1] in err
    assert err.count("Traceback") == (0 if error.startswith("OSError") else 1), err
