"""Which NVSHMEM this process would use: the host library and the device bitcode.

The two must be of one version. A device part that is newer than the host part, or a host part
that some other package loaded first, leads to hangs between machines, not to errors.
"""

import ctypes
import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

HOST = "libnvshmem_host.so.3"
_VERSION = re.compile(rb"NVSHMEM v(\d+)\.(\d+)\.(\d+)")


class Part(NamedTuple):
    """One half of NVSHMEM.

    Attributes:
        path: The file.
        version: Such as ``(3, 4, 5)``, or None if the file does not tell.
        why: Why it is this file.
    """

    path: Path
    version: tuple[int, int, int] | None
    why: str

    def describe(self) -> str:
        """Return version, file and reason in one line."""
        version = ".".join(map(str, self.version)) if self.version else "of unknown version"
        return f"{version} ({self.path}; {self.why})"


def host_part() -> Part | None:
    """Return the host library that is loaded, or that would be."""
    loaded = [path for path in _mapped_files() if path.name.startswith("libnvshmem_host.so")]
    if loaded:
        return Part(loaded[0], _ask(loaded[0]), "already loaded in this process")
    for root, why in _roots():
        for path in sorted((root / "lib").glob("libnvshmem_host.so*")):
            return Part(path, _read_version(path), why)
    return None


def device_part(capability: tuple[int, int] | None = None) -> Part | None:
    """Return the device bitcode that belongs to a GPU, or None if there is none.

    Args:
        capability: Of the GPU, such as ``(9, 0)``; without one, any bitcode will do.
    """
    for root, why in _roots():
        found = _bitcode(root / "lib", capability)
        if found:
            return Part(found, _read_version(found) or _wheel_version(root), why)
    return None


def check_versions(capability: tuple[int, int] | None = None) -> tuple[Part, Part | None]:
    """Refuse halves of NVSHMEM that do not belong together.

    Returns:
        The host part and, if there is one, the device part.

    Raises:
        RuntimeError: If there is no host part, or the two have different versions, naming both.
    """
    host, device = host_part(), device_part(capability)
    if host is None:
        raise RuntimeError(f"there is no {HOST}: install the nvidia-nvshmem wheel torch pins")
    known = device is not None and None not in (host.version, device.version)
    if device is not None and known and host.version != device.version:
        raise RuntimeError(
            f"NVSHMEM's host library is {host.describe()}, "
            f"its device bitcode is {device.describe()}: they must have one version"
        )
    return host, device


def _roots() -> list[tuple[Path, str]]:
    """Return the folders that may hold NVSHMEM, best first, and why each is looked at."""
    roots = []
    if home := os.environ.get("NVSHMEM_HOME"):
        roots.append((Path(home), "NVSHMEM_HOME"))
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except (ImportError, ValueError):
        spec = None
    for place in (spec.submodule_search_locations or []) if spec else []:
        roots.append((Path(place), "the installed nvidia-nvshmem wheel"))
    return roots


def _bitcode(lib: Path, capability: tuple[int, int] | None) -> Path | None:
    """Return ``libnvshmem_device.bc``, or since 3.7 the one of the nearest older GPU."""
    plain = lib / "libnvshmem_device.bc"
    if plain.exists():
        return plain
    built = {}
    for path in lib.glob("libnvshmem_device_sm_*.bc"):
        built[int(path.stem.rpartition("_")[2])] = path
    number = 999 if capability is None else capability[0] * 10 + capability[1]
    fitting = [sm for sm in built if sm <= number]
    return built[max(fitting)] if fitting else None


def _mapped_files() -> list[Path]:
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(Path(line.split()[-1]) for line in lines if ".so" in line))


def _ask(path: Path) -> tuple[int, int, int] | None:
    """Ask a loaded library, which needs no GPU."""
    try:
        numbers = [ctypes.c_int() for _ in range(3)]
        get = ctypes.CDLL(str(path)).nvshmemx_vendor_get_version_info
        get(*(ctypes.byref(number) for number in numbers))
    except (OSError, AttributeError):
        return _read_version(path)
    return numbers[0].value, numbers[1].value, numbers[2].value


def _read_version(path: Path) -> tuple[int, int, int] | None:
    """Find the version that a library carries in its text, without loading it."""
    try:
        found = _VERSION.search(path.read_bytes())
    except OSError:
        return None
    if not found:
        return None
    return int(found[1]), int(found[2]), int(found[3])


def _wheel_version(root: Path) -> tuple[int, int, int] | None:
    """Return the version of the headers or the wheel beside bitcode, which does not carry one."""
    header = root / "include" / "non_abi" / "nvshmem_version.h"
    if header.exists():
        parts = re.findall(r"VENDOR_(?:MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", header.read_text())
        if len(parts) == 3:
            return int(parts[0]), int(parts[1]), int(parts[2])
    for info in root.parent.parent.glob("nvidia_nvshmem_cu*.dist-info"):
        numbers = re.search(r"-(\d+)\.(\d+)\.(\d+)", info.name)
        if numbers:
            return int(numbers[1]), int(numbers[2]), int(numbers[3])
    return None
