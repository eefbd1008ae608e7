"""Runs made in the process of a test: settings that take seconds, and a look at what is left."""

from pathlib import Path

import moe_ckpt
import numpy as np
from moe_train.cli import command
from moe_train.metrics import read_metrics

SIZES = {
    "model.dim": 16, "model.num-layers": 2, "model.num-heads": 2, "model.num-kv-heads": 1,
    "model.num-experts": 4, "model.expert-dim": 8, "model.shared-dim": 8, "train.steps": 6,
    "train.batch-size": 4, "train.eval-sequences": 8, "train.sample-bytes": 4,
    "train.save-every": 3, "train.eval-every": 2, "train.log-every": 1, "train.threads": 1,
    "train.keep": 9, "train.device": "cpu", "data.sequence-length": 16, "routing.bias": True,
}  # fmt: skip


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


def refused(capsys, code: int, *parts: str) -> None:
    error = capsys.readouterr().err
    assert code != 0
    assert error.count("\n") == 1, error
    for part in parts:
        assert part in error
