"""GPUs, cores and memory."""

import os
from pathlib import Path

import torch

from moe_train.doctor.finding import BAD, GOOD, LACKS, Finding, gib


def hardware() -> list[Finding]:
    """Say what there is to compute with."""
    return [*_gpus(), _kernels(), _cores(), _memory()]


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        driver = "" if torch.version.cuda else "; this torch is built without CUDA"
        return [Finding("GPU", LACKS, f"none{driver}", "the CPU trains small models")]
    findings = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        try:
            free, total = torch.cuda.mem_get_info(number)
            torch.ones(2, device=f"cuda:{number}").sum().item()
        except RuntimeError as error:
            found = f"{about.name}: {str(error).splitlines()[0]}"
            findings.append(Finding(f"GPU {number}", BAD, found, "look at nvidia-smi"))
            continue
        memory = f"{gib(free)} of {gib(total)} free"
        found = f"{about.name}, capability {about.major}.{about.minor}, {memory}"
        busy = "another process holds most of it" if free < total / 2 else ""
        findings.append(Finding(f"GPU {number}", LACKS if busy else GOOD, found, busy))
    return findings


def _kernels() -> Finding:
    """Say how Triton's kernels would run, and which number formats the GPU has."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        said = "interpreted (TRITON_INTERPRET=1): right, and thousands of times slower"
        return Finding("kernels", LACKS if torch.cuda.is_available() else GOOD, said)
    if not torch.cuda.is_available():
        return Finding("kernels", GOOD, "plain torch operations on the CPU")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        said = f"capability {major}.{minor} has no bfloat16"
        return Finding("kernels", BAD, said, "set train.dtype to float32 and train.device to cpu")
    formats = "bfloat16"
    if major >= 10:
        formats += ", MXFP8"
    elif (major, minor) >= (9, 0):
        formats += ", MXFP8 through fp8 with shared scales"
    return Finding("kernels", GOOD, f"compiled; {formats}")


def _cores() -> Finding:
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    found = f"{cores} cores, load {load:.1f}, OMP_NUM_THREADS {threads}"
    quota = _cpu_quota()
    if quota and quota < cores:
        found += f", a quota of {quota:g}"
    if load > 1.5 * cores:
        return Finding("cores", LACKS, found, "others use them: steps take longer than measured")
    if threads.isdigit() and int(threads) > cores:
        return Finding("cores", LACKS, found, "more threads than cores wait for each other")
    return Finding("cores", GOOD, found)


def _cpu_quota() -> float:
    """Return how many cores the control group may use, 0 where nothing says so."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return 0.0


def _memory() -> Finding:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    free, total = kib["MemAvailable"] << 10, kib["MemTotal"] << 10
    limit = _memory_limit()
    found = f"{gib(free)} of {gib(total)} free"
    if limit and limit < total:
        found += f", a limit of {gib(limit)}"
        free = min(free, limit)
    if free < 1 << 30:
        return Finding("memory", BAD, found, "a run of the default model needs 1 GiB")
    return Finding("memory", GOOD, found)


def _memory_limit() -> int:
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return 0
