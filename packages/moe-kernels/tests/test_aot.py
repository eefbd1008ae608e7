"""What the compiler makes of every entry of the tables, for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99}  # the most a block may have
MATRIX_UNIT = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "sm_120": "mma"}
# Triton emulates the copy engine on GPUs without one, with narrow loads.
COPY_ENGINE = ("sm_90", "sm_100", "sm_120")
PRODUCTS = ("forward", "dgrad", "wgrad", "gate_up")


@pytest.fixture(scope="module")
def built() -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    program = [sys.executable, str(Path(__file__).with_name("aot_compile.py"))]
    halves = (["sm_90", "sm_80"], ["sm_100", "sm_120"])  # two processes, of about equal work
    if os.environ.get("HYPOTHESIS_PROFILE") == "smoke":
        halves = (["sm_90"], ["sm_100"])
    running = [
        subprocess.Popen(
            [*program, *names], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment,
        )
        for names in halves
    ]  # fmt: skip
    rows = []
    for process in running:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        rows += json.loads(out)
    return rows


def of(built: list[dict], dtype: str) -> list[dict]:
    return [row for row in built if row["dtype"] == dtype and row["kernel"].startswith(PRODUCTS)]


def test_every_architecture_was_compiled(built) -> None:
    smoke = os.environ.get("HYPOTHESIS_PROFILE") == "smoke"
    want = {"sm_90", "sm_100"} if smoke else set(SHARED_KIB)
    assert {row["architecture"] for row in built} == want
    assert {row["kernel"].split(".")[0] for row in of(built, "bf16")} == set(PRODUCTS)


def test_bf16_products_run_on_the_tensor_cores_of_each_generation(built) -> None:
    for row in of(built, "bf16"):
        assert row[MATRIX_UNIT[row["architecture"]]] > 0, row
        assert row["fma"] == 0, row


FLOAT8_UNIT = {"sm_90": "float8_wgmma", "sm_100": "block_scale", "sm_120": "float8_mma"}
TENSOR_MEMORY = 512  # columns


def test_mxfp8_products_run_on_the_float8_units_of_each_generation_that_has_them(built) -> None:
    scaled = [row for row in built if row["kernel"].startswith("scaled")]
    assert {row["architecture"] for row in scaled} == {a["architecture"] for a in built} - {"sm_80"}
    for row in scaled:
        assert row[FLOAT8_UNIT[row["architecture"]]] > 0, row
        assert row["tensor_memory"] <= TENSOR_MEMORY, row
        if row["architecture"] == "sm_100":  # scales go from shared to tensor memory, by one copy
            assert row["scale_copies"] > 0, row


def test_float32_products_are_not_rounded_to_tf32(built) -> None:
    for row in of(built, "fp32"):
        assert row["wgmma"] == row["tcgen05"] == row["mma"] == 0, row
        assert row["fma"] > 0, row


def test_global_memory_is_read_and_written_16_bytes_at_a_time(built) -> None:
    for row in built:
        if row["architecture"] in COPY_ENGINE and row["dtype"] != "u8":  # scales, one by one
            assert row["copy_engine"] > 0 or row["wide_loads"] > 0, row
            assert row["copy_engine"] > 0 or row["wide_stores"] > 0, row
            # A scale is one byte of a row; values are never read so.
            scales = 8 if row["kernel"].startswith("scaled") else 0
            assert row["narrow_loads"] <= scales, row


def test_no_kernel_spills_registers_or_asks_for_too_much_shared_memory(built) -> None:
    for row in built:
        assert row["stack"] == row["local"] == 0, row
        assert row["shared"] <= SHARED_KIB[row["architecture"]] * 1024, row
