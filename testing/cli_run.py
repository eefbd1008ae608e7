"""Starts ``moe-train run`` as a user does: as a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from moe_train.metrics import read_metrics

TINY = {
    "model.dim": 16, "model.num-layers": 2, "model.num-heads": 2, "model.num-kv-heads": 1,
    "model.num-experts": 8, "model.expert-dim": 8, "model.shared-dim": 8,
    "data.sequence-length": 32, "train.batch-size": 4, "train.eval-sequences": 6,
    "train.sample-bytes": 4, "train.log-every": 1, "train.eval-every": 0, "train.save-every": 0,
    "train.threads": 1, "train.device": "cpu", "train.dtype": "float64",
}  # fmt: skip


def command(folder: Path, *words: str, **settings: object) -> list[str]:
    """Return the command of a tiny run; ``train__steps=6`` stands for ``--train.steps 6``."""
    flags = TINY | {k.replace("__", ".").replace("_", "-"): v for k, v in settings.items()}
    options = [w for key, value in flags.items() for w in (f"--{key}", str(value))]
    return [sys.executable, "-m", "moe_train", "run", "--run-dir", str(folder), *options, *words]


def environment() -> dict[str, str]:
    """Return this process's environment without what would make the child a rank."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """Start a process whose output is kept."""
    return subprocess.Popen(
        arguments,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 240) -> tuple[int, str, str]:
    """Wait for a process and return its exit code, output and errors."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def losses(folder: Path) -> list[float]:
    """Return the training losses of a run, one a step from step 1 on."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))
    return [r["loss"] for r in records]
