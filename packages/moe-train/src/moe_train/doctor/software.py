"""Python, packages, and the ways of exchange between ranks that work with them."""

import importlib
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

from moe_dispatch.doctor.report import examine

from moe_train.doctor.finding import BAD, GOOD, LACKS, Finding

LAYERS = ("moe-kernels", "moe-dispatch", "moe-parallel", "moe-ckpt", "moe-train")
EXTRAS = {
    "tensorboard": "curves in TensorBoard",
    "wandb": "curves in Weights & Biases",
    "tokenizers": "text as tokens of a tokenizer file instead of bytes",
}


def software() -> list[Finding]:
    """Say which Python, torch, Triton and layers these are, and whether they work."""
    return [_python(), _torch(), _triton(), _compiler(), *_layers()]


def extras() -> list[Finding]:
    """Say which optional packages are installed."""
    findings = []
    for name, what in EXTRAS.items():
        found = version_of(name)
        if found:
            findings.append(Finding(name, GOOD, found))
        else:
            add = f"for {what}: install moe-train[{name}]"
            findings.append(Finding(name, LACKS, "not installed", add))
    return findings


def exchanges() -> list[Finding]:
    """Say which memory ranks of this machine can share. Takes seconds: each is tried."""
    report = examine()
    findings = [
        Finding(
            "NVSHMEM", BAD if report.refusal else GOOD if report.heaps["nvshmem"].works else LACKS,
            f"host {report.host}; device {report.device}", report.refusal,
        )
    ]  # fmt: skip
    findings += [
        Finding(f"memory {kind}", GOOD if found.works else LACKS, found.said or "works")
        for kind, found in report.heaps.items()
    ]
    return [*findings, Finding("ranks here use", GOOD, report.choice)]


def version_of(name: str) -> str:
    """Return the version of an installed package, or nothing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _python() -> Finding:
    return Finding("Python", GOOD, f"{platform.python_version()} at {sys.executable}")


def _torch() -> Finding:
    found = version_of("torch")
    try:
        torch = importlib.import_module("torch")
        (torch.ones(2, 2) @ torch.ones(2, 2)).sum().item()
    except Exception as error:  # whatever it is, that is the answer
        return Finding("torch", BAD, f"{found or 'none'}: {error}", "install torch 2.11 or newer")
    if tuple(int(part) for part in found.split(".")[:2]) < (2, 11):
        return Finding("torch", BAD, found, "install torch 2.11 or newer")
    return Finding("torch", GOOD, f"{found}, built for CUDA {torch.version.cuda or 'no'}")


def _triton() -> Finding:
    found = version_of("triton")
    try:
        importlib.import_module("triton")
    except Exception as error:  # whatever it is, that is the answer
        plain = "kernels run as plain torch operations, which is slow on a GPU"
        return Finding("triton", LACKS, f"{found or 'none'}: {error}", plain)
    return Finding("triton", GOOD, found)


def _compiler() -> Finding:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is None:
        need = "Triton builds its launchers with one, on a GPU: install gcc"
        return Finding("C compiler", LACKS, "none", need)
    return Finding("C compiler", GOOD, found)


def _layers() -> list[Finding]:
    findings = []
    for name in LAYERS:
        try:
            importlib.import_module(name.replace("-", "_"))
            findings.append(Finding(name, GOOD, version_of(name) or "not installed, on the path"))
        except Exception as error:  # whatever it is, that is the answer
            findings.append(Finding(name, BAD, f"{type(error).__name__}: {error}", "reinstall it"))
    return findings
