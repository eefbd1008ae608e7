"""After a power failure at any system call a disk holds the old checkpoint or the new, complete."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from moe_ckpt import load, save, scan, verify
from moe_ckpt.testing import blank, cut, run_ranks
from moe_ckpt.testing.replay import Disk, lay_out, parse, record

SHAPES = {
    ("layers.0.w", "master"): (4, 3),
    ("layers.0.w", "exp_avg"): (4, 3),
    ("b", "master"): (5,),
}
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from moe_ckpt import files, grid, pack
from test_replay import put
files.MANY, pack.PACKED_BYTES = int(sys.argv[7]), int(sys.argv[8])
if files.MANY == 4:  # 3 arrays of 10 chunks: many chunks, but not many arrays
    grid.LOWER_BYTES, grid.UPPER_BYTES = 8, 16
put(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
"""
# What is there before, and what is saved: step, value, keep.
SAVES = {
    "first": ({}, (2, 20.0, 9)),
    "next": ({1: 1.0, 2: 2.0}, (3, 30.0, 2)),
    "only": ({2: 2.0}, (3, 30.0, 1)),
    "again": ({1: 1.0, 2: 2.0}, (2, 20.0, 9)),
}


def arrays_of(value: float):
    return {key: np.full(shape, value, np.float32) for key, shape in SHAPES.items()}


def put(root, step: int, value: float, keep: int, size: int) -> None:
    def program(comm):
        shards = cut(arrays_of(value), comm.rank, comm.size)
        save(root, shards, step=step, state={"v": value}, comm=comm, keep=keep, overwrite=True)

    run_ranks(size, program)


def can_trace() -> bool:
    try:
        return subprocess.run(["strace", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def seen(root: Path) -> dict[int, float]:
    """Return the value of every checkpoint that a reader sees, each of them verified."""
    values = {}
    for checkpoint in scan(root).valid:
        verify(checkpoint.path)
        shards = blank(cut(arrays_of(0), 0, 1))
        loaded = load(root, shards, step=checkpoint.step)
        [value] = {float(x) for shard in shards for x in shard.data}
        assert loaded.state == {"v": value}
        values[checkpoint.step] = value
    assert not [item for item in scan(root).skipped if item.path.name != "LATEST"]
    return values


@pytest.fixture
def memory():
    directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=directory) as path:
        yield Path(path)


@pytest.mark.skipif(not can_trace(), reason="strace is not installed or may not trace")
@pytest.mark.parametrize(
    ("size", "many", "below"),
    [(1, 128, 0), (4, 128, 0), (4, 0, 0), (1, 4, 0), (1, 128, 100), (4, 128, 30), (4, 0, 100)],
)
@pytest.mark.parametrize("which", SAVES)
def test_a_power_failure_at_any_system_call_leaves_the_old_or_the_new(
    memory, which, size, many, below
) -> None:
    # With more than ``many`` chunks, or arrays, they are synced with the whole file system. Tensors
    # of fewer than ``below`` bytes, of which b has 20 and the others 48, stand in a pack.
    before, (step, value, keep) = SAVES[which]
    root = memory / "root"
    root.mkdir()
    for old, was in before.items():
        put(root, old, was, 9, 1)
    shutil.copytree(root, memory / "before")
    arguments = [str(Path(__file__).parent), str(root), step, value, keep, size, many, below]
    calls = record([sys.executable, "-c", PROGRAM, *map(str, arguments)])
    both = {**before, step: value}
    after = dict(list(both.items())[-keep:])
    allowed = [before, both, after]
    if keep == 1:
        allowed += [{key: both[key] for key in both if key == step}]
    disk, prefixes, at, known = Disk(root, memory / "before"), 0, {}, {}
    for call in [None, *calls]:
        if call is not None and not disk.apply(call):
            continue
        prefixes += 1
        for loss in ("nothing", "data", "everything"):
            tree = disk.after(loss)
            key = hash(frozenset(tree.items()))
            if key not in known:
                place = memory / f"at-{len(known)}"
                lay_out(tree, place)
                known[key] = seen(place)
                shutil.rmtree(place)
            got = known[key]
            assert got in allowed, (loss, prefixes, call, got)
            # What was there once is not lost again, whatever is lost.
            last = at.get(loss, before)
            assert got.get(step, None) == value or last.get(step) != value, (loss, prefixes)
            at[loss] = got
    assert at == dict.fromkeys(("nothing", "data", "everything"), after)
    assert len({tuple(found.items()) for found in known.values()}) >= 2
    assert prefixes > 30
    assert any(call.name == "syncfs" for call in calls) == (many < 128)
    assert seen(root) == after


def test_a_disk_forgets_what_was_not_synced(tmp_path) -> None:
    def shown(text: str) -> str:
        return "".join(f"\\x{byte:02x}" for byte in text.encode())

    root = f"{tmp_path}/r"
    path = shown(root + "/a")
    lines = [
        f'7 openat(AT_FDCWD, "{path}", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 3<{path}>',
        f'7 write(3<{shown(root + "/a")}>, "{shown("old")}", 3) = 3',
        f"7 fsync(3<{shown(root + '/a')}> <unfinished ...>",
        f'8 mkdir("{shown(root + "/d")}", 0777) = 0',
        "7 <... fsync resumed>) = 0",
        f"7 fsync(3<{shown(root)}>) = 0",
        f'7 write(3<{shown(root + "/a")}>, "{shown("new")}", 3) = 3',
        f'7 rename("{shown(root + "/a")}", "{shown(root + "/b")}") = 0',
        f'7 rename("{shown(root + "/x")}", "{shown(root + "/y")}") = -1 ENOENT (No such file)',
    ]  # fmt: skip
    (tmp_path / "r").mkdir()
    disk = Disk(tmp_path / "r", tmp_path / "r")
    assert [disk.apply(call) for call in parse(lines)] == [True] * 7
    assert disk.after("nothing") == {"b": b"oldnew", "d": None}
    assert disk.after("data") == {"b": b"old", "d": None}
    assert disk.after("everything") == {"a": b"old", "d": None}
    call = next(iter(parse([f'7 link("{shown(root + "/a")}") = 0'])))
    with pytest.raises(NotImplementedError, match="link"):
        disk.apply(call._replace(paths=(root,)))
