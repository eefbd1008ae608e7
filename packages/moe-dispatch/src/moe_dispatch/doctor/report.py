"""Put together what works here, and what ``open_heap`` would pick."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from moe_dispatch.doctor.probe import Found, probe
from moe_dispatch.doctor.versions import Part, check_versions, device_part, host_part

NAMES = ("torch", "triton", "nvshmem4py-cu13", "nvidia-nvshmem-cu13", "nvidia-nccl-cu13")


class Report(NamedTuple):
    """What was found on this machine.

    Attributes:
        versions: Of Python and packages.
        gpus: Their names.
        host: NVSHMEM's host library, or "none".
        device: NVSHMEM's bitcode, or "none".
        refusal: Why the two must not be used together, or "".
        heaps: Each kind of memory, tried in a process of its own.
        choice: What ``open_heap`` picks for ranks of this machine, and why.
    """

    versions: dict[str, str]
    gpus: list[str]
    host: str
    device: str
    refusal: str
    heaps: dict[str, Found]
    choice: str

    def text(self) -> str:
        """Return the report for people."""
        lines = [f"{name:20} {number}" for name, number in self.versions.items()]
        lines += [f"{'GPUs':20} {', '.join(self.gpus) or 'none'}"]
        lines += [f"{'NVSHMEM host':20} {self.host}", f"{'NVSHMEM device':20} {self.device}"]
        if self.refusal:
            lines += [f"{'refused':20} {self.refusal}"]
        for kind, found in self.heaps.items():
            lines += [f"{kind:20} {'works' if found.works else 'no'}: {found.said}"]
        return "\n".join([*lines, f"{'ranks here use':20} {self.choice}"])


def examine() -> Report:
    """Look at this machine. Takes some seconds, as each kind of memory is tried in a process."""
    count = torch.cuda.device_count()
    capability = torch.cuda.get_device_capability(0) if count else None
    refusal = ""
    try:
        check_versions(capability)
    except RuntimeError as error:
        refusal = str(error)
    heaps = {kind: probe(kind) for kind in ("threads", "host", "cuda_peer")}
    heaps["nvshmem"] = Found(False, refusal) if refusal else probe("nvshmem")
    return Report(
        versions={"python": platform.python_version(), **{n: _version(n) for n in NAMES}},
        gpus=[torch.cuda.get_device_name(i) for i in range(count)],
        host=_describe(host_part()),
        device=_describe(device_part(capability)),
        refusal=refusal,
        heaps=heaps,
        choice=_choice(heaps, bool(count)),
    )


def _choice(heaps: dict[str, Found], on_gpus: bool) -> str:
    if not on_gpus:
        if heaps["host"].works:
            return "host: all ranks are on the CPU of one machine"
        return f"AllToAllDispatcher: {heaps['host'].said}"
    if heaps["cuda_peer"].works:
        return "cuda_peer: all GPUs are on one machine and map each other's memory"
    if heaps["nvshmem"].works:
        return f"nvshmem: {heaps['cuda_peer'].said}"
    return (
        f"AllToAllDispatcher: cuda_peer: {heaps['cuda_peer'].said}; "
        f"nvshmem: {heaps['nvshmem'].said}"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _describe(part: Part | None) -> str:
    return "none" if part is None else part.describe()
