"""What the compiler makes of the kernels for a GPU, which the interpreter cannot tell."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("aot_kernels.py")
ROW_KERNELS = [
    "put", "put_dedup", "take", "scatter", "clear_tail", "give", "push", "pull", "expand", "reduce",
]  # fmt: skip


@pytest.fixture(scope="module", params=[90, 100])
def compiled(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Compile all kernels for one GPU; it takes some seconds and needs none."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(PROGRAM), f"--capability={request.param}"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    return {kernel["name"]: kernel for kernel in found}


def test_every_kernel_compiles(compiled: dict[str, dict[str, Any]]) -> None:
    assert len(compiled) == 19


@pytest.mark.parametrize("name", ROW_KERNELS)
def test_rows_move_sixteen_bytes_at_a_time(compiled: dict[str, dict[str, Any]], name: str) -> None:
    counts = compiled[name]["instructions"]
    assert counts.get("st.global.v4.b32", 0) > 0, counts
    assert not [kind for kind in counts if kind.endswith((".b16", ".v2.b32"))], counts


def test_a_signal_is_one_release_at_system_scope_after_a_barrier(
    compiled: dict[str, dict[str, Any]],
) -> None:
    kernel = compiled["signal"]
    releases = {k: n for k, n in kernel["instructions"].items() if "release" in k}
    assert sum(releases.values()) == 1
    assert all("sys" in kind for kind in releases)
    assert kernel["barrier_before_release"]


def test_a_wait_polls_with_acquires_at_system_scope(
    compiled: dict[str, dict[str, Any]],
) -> None:
    counts = compiled["wait"]["instructions"]
    polls = [kind for kind in counts if "acquire" in kind and "sys" in kind]
    assert polls, counts
    assert not [kind for kind in counts if "volatile" in kind], counts


@pytest.mark.parametrize("name", ["take", "scatter", "pull", "expand", "reduce"])
def test_products_are_rounded_before_they_are_added(
    compiled: dict[str, dict[str, Any]], name: str
) -> None:
    assert not compiled[name]["fused"]
