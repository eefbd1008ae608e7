"""What a name makes visible is on the disk before: a power failure shows the old or the new."""

import os
from pathlib import Path

import numpy as np
import pytest
from moe_ckpt import array, save
from moe_ckpt.testing import apart, cut


class Journal:
    """The renames of a save, each with what had been synced before it and what lay there.

    Attributes:
        synced: Paths given to fsync so far.
        renames: For each rename: its target, the paths synced before it that were not written
            since, and every path below its source.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.synced: list[Path] = []
        self.renames: list[tuple[Path, list[Path], list[Path]]] = []
        self._fsync, self._rename, self._write = os.fsync, os.rename, os.write
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(os, "rename", self.rename)
        patch.setattr(os, "write", self.write)

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        self.synced.append(self._path(descriptor))

    def write(self, descriptor: int, data: bytes) -> int:
        path = self._path(descriptor)
        self.synced = [p for p in self.synced if p != path]
        return self._write(descriptor, data)

    def rename(self, source: Path, target: Path) -> None:
        source, target = Path(source), Path(target)
        self.renames.append((target, self.synced, [source, *source.rglob("*")]))
        self._rename(source, target)
        # The directory has changed, so what was synced of it is out of date.
        self.synced = [path for path in self.synced if path != target.parent]

    @staticmethod
    def _path(descriptor: int) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


@pytest.mark.parametrize(
    ("below", "folders"),
    [(0, {"arrays", "w", "master", "b"}), (30, {"arrays", "w", "master", "packs", "00000"})],
)
def test_what_a_rename_shows_was_synced_before_it(tmp_path, monkeypatch, below, folders) -> None:
    journal = Journal(monkeypatch)
    arrays = {("w", "master"): np.ones((4, 3), np.float32), ("b", "master"): np.ones(5, np.float32)}
    with apart(below):
        target = save(tmp_path, cut(arrays, 0, 1), step=1, state={})
    committed, latest = journal.renames
    assert committed[0] == target
    # tensorstore syncs the files of chunks by itself; see the test below.
    own = [path for path in committed[2] if not path.name.startswith("c.")]
    assert len(own) == 4 + 2 + 1 + 1 + 2 + 2  # small files, zarr.json, and the directories
    assert folders < {path.name for path in own}
    assert set(own) <= set(committed[1])
    assert latest[0] == tmp_path / "LATEST"
    assert {*latest[2], tmp_path} <= set(latest[1])
    assert tmp_path in journal.synced


def test_tensorstore_syncs_the_files_of_chunks() -> None:
    assert array._context().spec.to_json()["file_io_sync"] is True
