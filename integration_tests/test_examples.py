"""The lessons' scripts run, and say honestly what they could not measure."""

import subprocess
import sys
from pathlib import Path

import cli_run
import pytest
import torch

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_lesson_runs(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path), "--smoke"], env=cli_run.environment(),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    if not torch.cuda.is_available() and path.stem != "expert_learning_rate":
        assert "GPU" in done.stdout


def test_the_offload_formula_counts_what_it_says() -> None:
    words = ["--dim", "4", "--expert-dim", "3", "--top-k", "2", "--rate", "1", "--link", "1"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES[0].parent / "offload_link.py"), "--smoke", *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    kept, flops = 2 * (2 * 4 + 2 * 2 * 3), 2 * (4 * 16 + 2 * 3 * 12)
    assert f"{kept} bytes and {flops} FLOPs" in done.stdout
    assert f"{kept / 1e9 * 1e9:.1f} ns a token" in done.stdout
