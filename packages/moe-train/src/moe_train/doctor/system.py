"""Disk, shared memory, ports and limits of the operating system."""

import os
import resource
import shutil
import socket
from pathlib import Path

from moe_train.doctor.finding import BAD, GOOD, LACKS, Finding, gib

ENOUGH_FILES = 1024
"""A checkpoint of a large model has thousands of chunks, some hundred of which are open at once."""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def system(run_dir: Path) -> list[Finding]:
    """Say whether the operating system lets a run do what it does.

    Args:
        run_dir: Where a run would write.
    """
    return [
        _disk(run_dir),
        _shared_memory(),
        _port(),
        _host_name(),
        _open_files(),
        _locked_memory(),
        _launcher(),
    ]


def _disk(run_dir: Path) -> Finding:
    there = run_dir.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    found = f"{gib(free)} free for {run_dir}"
    if not os.access(there, os.W_OK):
        return Finding("disk", BAD, f"{there} cannot be written", "choose another --run-dir")
    if free < 1 << 28:
        return Finding("disk", BAD, found, "a checkpoint is 12 bytes a parameter: make room")
    return Finding("disk", GOOD, found)


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("shared memory", LACKS, f"/dev/shm: {error.strerror}", "ranks use pipes")
    found = f"{gib(free)} free in /dev/shm"
    if free < 1 << 26:
        return Finding("shared memory", LACKS, found, "NCCL wants more: docker run --shm-size=1g")
    return Finding("shared memory", GOOD, found)


def _port() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            number = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", number), timeout=5):
                return Finding("ports", GOOD, f"127.0.0.1:{number} could be opened and reached")
    except OSError as error:
        return Finding("ports", BAD, f"127.0.0.1: {error}", "several ranks cannot meet here")


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        said = f"{name} does not resolve: {error}"
        remedy = "for ranks of torchrun: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return Finding("host name", LACKS, said, remedy)
    return Finding("host name", GOOD, f"{name} is {address}")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} at once, at most {hard}"
    if soft < ENOUGH_FILES:
        return Finding("open files", LACKS, found, f"large checkpoints: ulimit -n {ENOUGH_FILES}")
    return Finding("open files", GOOD, found)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", GOOD, "unlimited")
    remedy = "InfiniBand between nodes needs ulimit -l unlimited"
    return Finding("locked memory", LACKS, f"{soft >> 10} KiB", remedy)


def _launcher() -> Finding:
    found = {name: os.environ[name] for name in LAUNCHER if name in os.environ}
    if "RANK" in found:
        said = ", ".join(f"{name}={value}" for name, value in found.items())
        return Finding("launcher", LACKS, said, "this shell looks like a rank: unset them")
    return Finding("launcher", GOOD, "this shell is not a rank")
