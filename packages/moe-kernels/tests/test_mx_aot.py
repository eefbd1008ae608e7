"""What the compiler makes of the kernels of MXFP8, for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GIVEN_SCALES = ("columns grouped mxrow", "both grouped mxrow")  # from the kernel before
SHARED_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227}


@pytest.fixture(scope="module")
def built() -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    smoke = os.environ.get("HYPOTHESIS_PROFILE") == "smoke"
    halves = (["sm_90"], ["sm_100"]) if smoke else (["sm_90"], ["sm_100", "sm_80"])
    program = [sys.executable, str(Path(__file__).with_name("aot_mx.py"))]
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


def test_values_and_bytes_move_in_vectors_and_nothing_spills(built) -> None:
    assert {"sm_90", "sm_100"} <= {row["architecture"] for row in built}
    for row in built:
        assert row["stack"] == row["local"] == 0, row
        assert row["shared"] <= SHARED_KIB[row["architecture"]] * 1024, row
        # Only scales, one for 32 values, are read as bytes.
        assert row["narrow_loads"] <= (row["kernel"] == "dequantize"), row
        assert row["wide_loads"] > 0, row
        if not row["kernel"].startswith("amax"):
            assert row["wide_stores"] > 0, row
            # Only scales, one for 32 values, are stored as bytes.
            assert row["wide_stores"] + row["byte_stores"] + row["single_stores"] == row["stores"]
            assert row["single_stores"] <= row["kernel"].startswith("dswiglu"), row


def test_float8_is_rounded_by_the_instruction_where_there_is_one(built) -> None:
    for row in built:
        writes = not row["kernel"].startswith(("amax", "dequantize"))
        assert (row["conversions"] > 0) == (writes and row["architecture"] != "sm_80"), row


def test_no_subnormal_is_flushed_where_bytes_must_be_exact(built) -> None:
    for row in built:
        assert row["flushes"] == 0, row


def test_magnitudes_are_compared_without_sign(built) -> None:
    # They pass 2**31 from |x| = 1 on: a signed comparison would take small values for large ones.
    for row in built:
        finds = row["kernel"] != "dequantize" and row["kernel"] not in GIVEN_SCALES
        assert row["unsigned"] > 0 or not finds, row
