"""What a disk may hold after a power failure, from the system calls that a program made.

``record`` runs a program under strace, which sees the calls of C++ threads too. ``Disk`` plays
them back one by one and keeps apart what is in memory and what is on the disk: data of a file since
its ``fsync``, and names in a directory since its own, may be lost.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

CALLS = (
    "openat,open,creat,write,pwrite64,writev,pwritev,pwritev2,rename,renameat,renameat2,mkdir,"
    "mkdirat,unlink,unlinkat,rmdir,fsync,fdatasync,ftruncate,truncate,link,linkat,symlink,"
    "symlinkat,fallocate,copy_file_range,sendfile,mmap,msync,sync,syncfs"
)
_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+|\?)(.*)", re.DOTALL)
_UNFINISHED = re.compile(r"(\d+) +(.*) <unfinished \.\.\.>$", re.DOTALL)
_RESUMED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)$", re.DOTALL)
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_PLACE = re.compile(r"<((?:\\x[0-9a-f]{2})+)>")

Loss = Literal["nothing", "data", "everything"]
"""What a power failure takes of what was not synced: nothing, the data of files but no name (as
file systems do that order their journal before data), or data and names."""


class Call(NamedTuple):
    """A system call that succeeded.

    Attributes:
        name: Of the call.
        paths: Of what it was given, in order; descriptors by the path of their file.
        data: What it writes.
        text: Its arguments as strace shows them.
    """

    name: str
    paths: tuple[str, ...]
    data: bytes
    text: str


def record(command: Sequence[str]) -> list[Call]:
    """Run a command and return the calls that may change files, in order of their completion.

    Raises:
        subprocess.CalledProcessError: If it fails, or strace may not trace.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".strace") as trace:
        options = ["-f", "-y", "-xx", "-s", str(1 << 24), "-e", f"trace={CALLS}", "-o", trace.name]
        subprocess.run(["strace", *options, *command], check=True, capture_output=True)
        return list(parse(trace.read().splitlines()))


def parse(lines: Sequence[str]) -> Iterator[Call]:
    """Yield the calls of a trace that succeeded."""
    waiting: dict[str, str] = {}
    for line in lines:
        if match := _UNFINISHED.match(line):
            waiting[match[1]] = match[2]
            continue
        resumed = _RESUMED.match(line)
        whole = f"{resumed[1]} {waiting.pop(resumed[1])}{resumed[2]}" if resumed else line
        match = _LINE.match(whole)
        if match is None or match[4] in ("?", "-1"):
            continue
        _, name, arguments, _, result = match.groups()
        texts = [bytes.fromhex(t.replace("\\x", "")) for t in _TEXT.findall(arguments)]
        places = [bytes.fromhex(p.replace("\\x", "")).decode() for p in _PLACE.findall(arguments)]
        if name in ("open", "openat", "creat"):
            places = [bytes.fromhex(p.replace("\\x", "")).decode() for p in _PLACE.findall(result)]
        elif name in ("rename", "renameat", "renameat2", "mkdir", "unlink", "rmdir"):
            places = [text.decode() for text in texts]
        elif name in ("mkdirat", "unlinkat"):
            places = [str(Path(places[0], texts[0].decode()))]
        yield Call(name, tuple(places), b"".join(texts), arguments)


@dataclass(eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    safe: bytes = b""


@dataclass(eq=False)
class _Directory:
    names: dict[str, "_File | _Directory"] = field(default_factory=dict)
    safe: dict[str, "_File | _Directory"] = field(default_factory=dict)


class Disk:
    """A directory, played back.

    Args:
        root: Where it was while the calls were recorded.
        before: A copy of what was in it before. All of that counts as synced.
    """

    def __init__(self, root: Path, before: Path):
        self.root, self._top = root, _taken_from(before)

    def apply(self, call: Call) -> bool:
        """Do what a call did and return whether it changed anything here.

        Raises:
            NotImplementedError: If it may have changed something in a way that is not played back.
        """
        if not any(self._inside(path) for path in call.paths):
            return False
        match call.name:
            case "open" | "openat" | "creat":
                return self._open(call)
            case "write" | "writev":  # whatever is written here is written from its beginning
                self._file(call.paths[0]).data.extend(call.data)
            case "pwrite64":
                offset = int(call.text.rsplit(",", 1)[1])
                self._file(call.paths[0]).data[offset : offset + len(call.data)] = call.data
            case "ftruncate":
                del self._file(call.paths[0]).data[int(call.text.rsplit(",", 1)[1]) :]
            case "mkdir" | "mkdirat":
                parent, name = self._parent(call.paths[0])
                parent.names[name] = _Directory()
            case "unlink" | "rmdir" | "unlinkat":
                parent, name = self._parent(call.paths[0])
                del parent.names[name]
            case "rename" | "renameat" | "renameat2":
                self._rename(call)
            case "fsync" | "fdatasync":
                self._sync(call.paths[0])
            case "syncfs":
                self._sync_all(self._top)
            case "mmap" if "PROT_WRITE" not in call.text or "MAP_SHARED" not in call.text:
                return False
            case _:
                raise NotImplementedError(f"{call.name}({call.text[:200]})")
        return True

    def after(self, loss: Loss) -> dict[str, bytes | None]:
        """Return what the disk holds after a power failure: files, and None for directories."""
        return dict(_walk(self._top, "", loss))

    def _inside(self, path: str) -> bool:
        return path == str(self.root) or path.startswith(f"{self.root}/")

    def _find(self, path: str) -> "_File | _Directory":
        node: _File | _Directory = self._top
        for part in Path(path).relative_to(self.root).parts:
            assert isinstance(node, _Directory), path
            node = node.names[part]
        return node

    def _file(self, path: str) -> _File:
        node = self._find(path)
        assert isinstance(node, _File), path
        return node

    def _parent(self, path: str) -> tuple[_Directory, str]:
        node = self._find(str(Path(path).parent))
        assert isinstance(node, _Directory), path
        return node, Path(path).name

    def _open(self, call: Call) -> bool:
        if not {"O_CREAT", "O_TRUNC"} & set(re.findall(r"\w+", call.text)):
            return False
        parent, name = self._parent(call.paths[0])
        node = parent.names.setdefault(name, _File())
        if "O_TRUNC" in call.text and isinstance(node, _File):
            node.data.clear()
        return True

    def _rename(self, call: Call) -> None:
        (first, old), (second, new) = map(self._parent, call.paths)
        if "RENAME_EXCHANGE" in call.text:
            first.names[old], second.names[new] = second.names[new], first.names[old]
        else:
            second.names[new] = first.names.pop(old)

    def _sync_all(self, node: _Directory) -> None:
        node.safe = dict(node.names)
        for child in node.names.values():
            if isinstance(child, _Directory):
                self._sync_all(child)
            else:
                child.safe = bytes(child.data)

    def _sync(self, path: str) -> None:
        node = self._find(path)
        if isinstance(node, _File):
            node.safe = bytes(node.data)
        else:
            node.safe = dict(node.names)


def _taken_from(path: Path) -> _Directory:
    node = _Directory()
    for entry in path.iterdir():
        if entry.is_dir():
            node.names[entry.name] = _taken_from(entry)
        else:
            data = entry.read_bytes()
            node.names[entry.name] = _File(bytearray(data), data)
    node.safe = dict(node.names)
    return node


def _walk(node: _Directory, prefix: str, loss: Loss) -> Iterator[tuple[str, bytes | None]]:
    for name, child in (node.safe if loss == "everything" else node.names).items():
        if isinstance(child, _Directory):
            yield prefix + name, None
            yield from _walk(child, f"{prefix}{name}/", loss)
        else:
            yield prefix + name, bytes(child.data) if loss == "nothing" else child.safe


def lay_out(tree: dict[str, bytes | None], path: Path) -> None:
    """Make a directory that holds what ``Disk.after`` returned."""
    path.mkdir()
    for name, data in tree.items():
        if data is None:
            (path / name).mkdir()
        else:
            (path / name).write_bytes(data)
