"""The doctor says what works and why, and refuses halves of NVSHMEM that do not fit together."""

import json
from pathlib import Path

import pytest
from moe_dispatch.cli import main
from moe_dispatch.doctor import (
    check_versions,
    device_part,
    host_part,
    probe,
    report,
    versions,
)


def make_nvshmem(root: Path, host: str, device: str, names: tuple[str, ...]) -> None:
    """Make files that look like an installed NVSHMEM."""
    (root / "lib").mkdir(parents=True)
    (root / "include" / "non_abi").mkdir(parents=True)
    (root / "lib" / "libnvshmem_host.so.3").write_bytes(b"\x7fELF....NVSHMEM v" + host.encode())
    for name in names:
        (root / "lib" / name).write_bytes(b"BC")
    parts = zip(("MAJOR", "MINOR", "PATCH"), device.split("."), strict=True)
    text = "".join(f"#define NVSHMEM_VENDOR_{part}_VERSION {n}\n" for part, n in parts)
    (root / "include" / "non_abi" / "nvshmem_version.h").write_text(text)


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as if torch had not loaded an NVSHMEM of its own."""
    monkeypatch.setattr(versions, "_mapped_files", list)


@pytest.mark.usefixtures("not_loaded")
def test_halves_of_different_versions_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_nvshmem(tmp_path, "3.6.5", "3.4.5", ("libnvshmem_device.bc",))
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    with pytest.raises(RuntimeError) as error:
        check_versions()
    said = str(error.value)
    assert f"host library is 3.6.5 ({tmp_path}/lib/libnvshmem_host.so.3; NVSHMEM_HOME)" in said
    assert f"bitcode is 3.4.5 ({tmp_path}/lib/libnvshmem_device.bc; NVSHMEM_HOME)" in said
    monkeypatch.setattr(report, "probe", lambda kind: probe.Found(True, f"{kind} was not tried"))
    assert main(["doctor"]) == 1
    assert report.examine().heaps["nvshmem"] == (False, said)


@pytest.mark.usefixtures("not_loaded")
def test_of_two_nvshmems_the_named_one_is_taken_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_nvshmem(tmp_path / "one", "3.4.5", "3.4.5", ("libnvshmem_device.bc",))
    make_nvshmem(tmp_path / "other", "3.6.5", "3.6.5", ("libnvshmem_device.bc",))
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path / "other"))
    host, device = check_versions()
    assert host.version == (3, 6, 5)
    assert device is not None
    assert device.version == (3, 6, 5)
    assert host.why == device.why == "NVSHMEM_HOME"


@pytest.mark.parametrize(
    ("capability", "name"),
    [((9, 0), "sm_90"), ((8, 6), "sm_80"), ((10, 0), "sm_90"), (None, "sm_90"), ((7, 0), None)],
)
def test_the_bitcode_of_the_nearest_older_gpu_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    name: str | None,
) -> None:
    names = ("libnvshmem_device_sm_80.bc", "libnvshmem_device_sm_90.bc")
    make_nvshmem(tmp_path, "3.7.2", "3.7.2", names)
    monkeypatch.setattr(versions, "_roots", lambda: [(tmp_path, "test")])
    part = device_part(capability)
    assert (part and part.path.name) == (name and f"libnvshmem_device_{name}.bc")


@pytest.mark.usefixtures("not_loaded")
def test_without_nvshmem_that_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_roots", list)
    assert host_part() is None
    with pytest.raises(RuntimeError, match=r"there is no libnvshmem_host\.so\.3"):
        check_versions()


def test_the_doctor_tries_each_kind_and_says_what_ranks_here_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["doctor", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert set(facts["heaps"]) == {"threads", "host", "cuda_peer", "nvshmem"}
    assert facts["heaps"]["host"] == {"works": True, "said": "1 MiB in /dev/shm"}
    if not facts["gpus"]:
        assert facts["heaps"]["cuda_peer"]["said"] == "torch sees no CUDA device"
        assert facts["choice"] == "host: all ranks are on the CPU of one machine"


def test_a_probe_that_dies_takes_nobody_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.sys, "executable", "/bin/false")
    found = probe.probe("nvshmem")
    assert found == (False, "the process ended with 1: it said nothing")


def test_a_plan_is_told_in_mebibytes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--world-size=8", "--num-experts=64", "--max-tokens=4096", "--top-k=8", "--dim=2048"]
    assert main(["plan", *sizes, "--overflow=capacity", "--capacity-factor=1.25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "40960 rows for the experts of a rank, of at most 262144"
    assert "rows                        160.0 MiB" in lines
    with pytest.raises(SystemExit):
        main(["plan", *sizes, "--overflow=capacity"])
    assert "capacity_factor belongs to overflow" in capsys.readouterr().err
