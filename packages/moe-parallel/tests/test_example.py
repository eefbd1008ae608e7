"""The example: under 80 lines, and the same on one rank and on a pipeline of two, twice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_dense.py"


def losses(*launcher: str) -> dict[int, float]:
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
    return {int(step): float(loss) for _, step, _, loss in lines}


def test_the_example_trains_torchs_transformer_alike_on_one_rank_and_on_four() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80
    alone = losses()
    four = losses("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    assert four.keys() == alone.keys()
    for step, loss in alone.items():
        assert four[step] == pytest.approx(loss, rel=1e-3)
    assert four[0] == pytest.approx(alone[0], rel=1e-5)
    first, *_, last = alone.values()
    assert last < 0.75 * first
