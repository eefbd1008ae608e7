"""The doctor says what is there, what is missing and what to do, and its exit code agrees."""

import json
import os
import resource
import shutil
import socket
from importlib.metadata import version
from pathlib import Path

import pytest
from moe_train.cli import command
from moe_train.doctor import BAD, GOOD, LACKS, hardware, software, system

pytestmark = pytest.mark.usefixtures("alone")


def answers(findings):
    return {finding.name: finding for finding in findings}


def test_a_machine_that_runs_these_tests_can_start_a_run(capsys, tmp_path) -> None:
    words = ["doctor", "--quick", "--json", "--run-dir", str(tmp_path / "a")]
    assert command(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["counts"]["bad"] == 0
    assert {f["name"] for f in report["software"]} >= {"Python", "torch", "triton", "moe-train"}
    [torch] = [f["found"] for f in report["software"] if f["name"] == "torch"]
    assert version("torch").partition("+")[0] in torch
    assert command(words[:2] + words[3:]) == 0
    assert "a run can start here" in capsys.readouterr().out
    assert not (tmp_path / "a").exists()


def test_what_would_stop_a_run_is_bad_and_the_exit_code_says_so(capsys, tmp_path) -> None:
    assert command(["doctor", "--quick", "--run-dir", "/proc/here"]) == 1
    out = capsys.readouterr().out
    assert "bad   disk" in out
    assert "/proc/here" in out


def test_a_full_disk_is_bad(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 1 << 20))
    found = answers(system(tmp_path / "not" / "yet"))
    assert found["disk"].state == BAD
    assert found["shared memory"].state == LACKS


def test_a_machine_without_ports_cannot_join_ranks(tmp_path, monkeypatch) -> None:
    def refuse(*_, **__):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    found = answers(system(tmp_path))["ports"]
    assert found.state == BAD
    assert "Permission denied" in found.found


def test_a_name_that_does_not_resolve_is_said_with_the_way_out(tmp_path, monkeypatch) -> None:
    def refuse(_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", refuse)
    found = answers(system(tmp_path))["host name"]
    assert found.state == LACKS
    assert "GLOO_SOCKET_IFNAME" in found.remedy


def test_limits_are_read_and_not_guessed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    found = answers(system(tmp_path))
    assert found["open files"].state == LACKS
    assert "256" in found["open files"].found
    assert "4096" in found["open files"].found


def test_a_shell_that_looks_like_a_rank_is_said(tmp_path, monkeypatch) -> None:
    assert answers(system(tmp_path))["launcher"].state == GOOD
    monkeypatch.setenv("RANK", "3")
    found = answers(system(tmp_path))["launcher"]
    assert found.state == LACKS
    assert "RANK=3" in found.found


def test_too_many_threads_are_said(monkeypatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setenv("OMP_NUM_THREADS", str(10 * len(os.sched_getaffinity(0))))
    assert answers(hardware())["cores"].state == LACKS
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(Path, "read_text", _without_quota)
    assert answers(hardware())["cores"].state == GOOD


_read_text = Path.read_text


def _without_quota(path: Path, *arguments, **named) -> str:
    if "cgroup" in str(path):
        raise FileNotFoundError(str(path))
    return _read_text(path, *arguments, **named)


def test_a_layer_that_cannot_be_imported_is_bad(monkeypatch) -> None:
    import importlib

    original = importlib.import_module

    def load(name: str, *rest):
        if name == "moe_dispatch":
            raise ImportError("libnvshmem.so is damaged")
        if name == "triton":
            raise ImportError("no triton for this machine")
        return original(name, *rest)

    monkeypatch.setattr(importlib, "import_module", load)
    found = answers(software())
    assert found["moe-dispatch"].state == BAD
    assert "libnvshmem.so is damaged" in found["moe-dispatch"].found
    assert found["triton"].state == LACKS
    assert "plain torch" in found["triton"].remedy
