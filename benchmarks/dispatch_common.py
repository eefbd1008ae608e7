"""What the benchmarks of moe-dispatch share: sections with a time limit, ranks as processes."""

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
SAFE = {
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_MNNVL": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # a hardware queue for each stream
    "CUDA_MODULE_LOADING": "EAGER",  # loading later can wait for a kernel that waits for us
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
}


def machine() -> dict[str, Any]:
    """Say where, when and on what this ran."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    names = ["triton", "nvidia-nvshmem-cu13", "nvshmem4py-cu13", "nvidia-nccl-cu13"]
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": commit.stdout.strip() or os.environ.get("COMMIT", "unknown"),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in names},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def child_environment(wheels: Path) -> dict[str, str]:
    """Return the environment of sections: packages of this tree, and wheels that are carried.

    Wheels are unpacked beside each other; what is installed already comes first.
    """
    paths = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    found = sorted(wheels.glob("nvshmem4py_cu13*.whl")) + sorted(wheels.glob("cuda_*.whl"))
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    fitting = [wheel for wheel in found if tag in wheel.name or "py3-none" in wheel.name]
    if fitting:
        folder = tempfile.mkdtemp(prefix="wheels-")
        for wheel in fitting:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        paths.append(folder)
    environment = {**os.environ, **SAFE, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("TRITON_INTERPRET", None)
    return environment


def run_section(
    script: str, name: str, limit: float, environment: dict[str, str], prefix: Sequence[str] = ()
) -> dict[str, Any]:
    """Run one section of a script in a process of its own and return what it found.

    Returns:
        Its rows, or why there are none; never raises for what the section does.
    """
    since = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="section-") as folder:
        out = Path(folder) / "rows.json"
        log = Path(folder) / "log"
        command = [*prefix, sys.executable, script, "--section", name, "--rows", str(out)]
        with log.open("w") as file:
            process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code: int | str = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = f"no end within {limit:.0f} s"
                os.killpg(process.pid, 9)
                process.wait()
        rows = json.loads(out.read_text()) if out.exists() else []
        text = log.read_text(errors="replace")
    found: dict[str, Any] = {
        "section": name, "ok": code == 0, "seconds": round(time.monotonic() - since, 1),
        "rows": rows,
    }  # fmt: skip
    if code != 0:
        found["code"], found["log"] = code, text[-3000:]
    sys.stdout.write(f"[{name}] {'ok' if code == 0 else code} in {found['seconds']} s\n")
    for row in rows:
        sys.stdout.write(f"  {json.dumps(row)}\n")
    if code != 0:
        sys.stdout.write(text[-1500:] + "\n")
    sys.stdout.flush()
    return found


def run_ranks(
    script: str, name: str, world_size: int, limit: float, extra: Sequence[str] = ()
) -> list[Any]:
    """Run a section's ranks as processes and return what each wrote.

    Raises:
        RuntimeError: If one failed or did not end; the others are ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        outs = [Path(folder) / f"{rank}.json" for rank in range(world_size)]
        processes = [
            subprocess.Popen(
                [sys.executable, script, "--section", name, "--rank", str(rank), "--world",
                 str(world_size), "--port", str(port), "--rows", str(out), *extra],
            )
            for rank, out in enumerate(outs)
        ]  # fmt: skip
        end = time.monotonic() + limit
        while time.monotonic() < end and any(p.poll() is None for p in processes):
            if any(p.poll() not in {None, 0} for p in processes):
                end = min(end, time.monotonic() + 5)
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        if None in codes:
            raise RuntimeError(f"no end within {limit:.0f} s: {codes}")
        return [json.loads(out.read_text()) if out.exists() else None for out in outs]


def join_group(rank: int, world_size: int, port: int) -> dist.ProcessGroup:
    """Make a gloo group of this machine's ranks."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def milliseconds(function: Callable[[], object], repeat: int = 20, warm: int = 3) -> float:
    """Return the median time of a call on the GPU, between events, cold L2 or not as it comes."""
    for _ in range(warm):
        function()
    pairs = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in pairs)
    return times[len(times) // 2]
