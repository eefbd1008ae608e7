"""What the compiler makes of the kernels for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = {90: 227 * 1024, 100: 227 * 1024}  # the most that one block may have


@pytest.fixture(scope="module")
def built() -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    program = [sys.executable, str(Path(__file__).with_name("aot_compile.py")), "bf16", "fp32"]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_bf16_products_run_on_the_tensor_cores_of_each_generation(built) -> None:
    assert {row["capability"] for row in built} == {90, 100}
    for row in built:
        if row["dtype"] == "bf16":
            unit = "wgmma" if row["capability"] == 90 else "tcgen05"
            assert row[unit] > 0, row
            assert row["fma"] == 0, row


def test_float32_products_are_not_rounded_to_tf32(built) -> None:
    for row in built:
        if row["dtype"] == "fp32":
            assert row["wgmma"] == row["tcgen05"] == row["mma"] == 0, row
            assert row["fma"] > 0, row


def test_global_memory_is_read_and_written_16_bytes_at_a_time(built) -> None:
    for row in built:
        assert row["wide_loads"] > 0, row
        assert row["wide_stores"] > 0, row
        assert row["narrow_loads"] == 0, row


def test_no_kernel_spills_registers_or_asks_for_too_much_shared_memory(built) -> None:
    for row in built:
        assert row["stack"] == row["local"] == 0, row
        assert row["shared"] <= SHARED_BYTES[row["capability"]], row
