"""A process that ends without waiting has its checkpoint, though it can start no thread by then."""

import subprocess
import sys

import pytest
from moe_ckpt import open_checkpoint, verify

# What of Python 3.12.1 is true at the end is made true of every version: no thread starts once the
# main thread has ended. The save waits for that, so that all of it comes after.
PROGRAM = """
import atexit, sys, threading, time
from unittest import mock
import numpy as np
from moe_ckpt import AsyncSaver, background, find_latest, lease, object_commit, verify
from moe_ckpt.testing import cut

root, kinds = sys.argv[1], int(sys.argv[2])
begin, save = threading.Thread.start, background.save_views
ended = lambda: not threading.main_thread().is_alive()

def start(thread):
    if ended():
        raise RuntimeError("can't create new thread at interpreter shutdown")
    begin(thread)

def save_at_the_end(*args):
    while not ended():
        time.sleep(0.001)
    return save(*args)

def commit(root, *args):
    while "://" in sys.argv[1] and b'"beat": 3' not in (root / ".lock").read_bytes():
        time.sleep(0.001)  # the lease is renewed all the same
    return made(root, *args)

made, object_commit.commit = object_commit.commit, commit
threading.Thread.start, background.save_views, lease.BEAT_SECONDS = start, save_at_the_end, 0.01
arrays = {("w", f"kind{n}"): np.full((3, 5), n, np.float32) for n in range(kinds)}
saver = AsyncSaver(root)
saver.save(cut(arrays, 0, 1), step=1, state={})
atexit.register(lambda: print(verify(find_latest(root).path)))
"""


@pytest.mark.parametrize("kinds", [1, 30, 200])  # synced by one call each, or together
def test_a_save_that_begins_after_the_end_of_the_main_thread_is_complete(tmp_path, kinds) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(kinds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stderr, f"arrays={kinds}," in done.stdout) == ("", True)
    reader = open_checkpoint(tmp_path / "step-00000001")
    for n in range(kinds):
        assert (reader.read("w", f"kind{n}") == n).all()


def test_the_lease_of_an_object_store_is_kept_to_the_end(tmp_path) -> None:
    command = [sys.executable, "-c", PROGRAM, "memory://run", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stderr, "arrays=3," in done.stdout) == ("", True)


FLAT = """
import os, sys
import numpy as np
from moe_ckpt import AsyncSaver
from moe_ckpt.testing import cut
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
arrays = {(f"layers.{n}.w", k): np.full((4, 256, 1024), n, np.float32)
          for n in range(4) for k in ("master", "exp_avg")}  # 32 MiB
with AsyncSaver(sys.argv[1], keep=1) as saver:
    for step in range(int(sys.argv[2])):
        saver.save(cut(arrays, 0, 1), step=step, state={})
        saver.wait()
        sys.stdout.write(f"{resident()}\\n")
"""


def test_resident_memory_is_flat_over_30_saves(tmp_path) -> None:
    command = [sys.executable, "-c", FLAT, str(tmp_path), "30"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    resident = [float(line) for line in done.stdout.split()]
    assert len(resident) == 30
    # What is kept of each save would be 32 MiB: 27 of them are 864.
    assert max(resident[3:]) - resident[2] < 16, resident


LEFT = """
import sys
import numpy as np
from moe_ckpt import AsyncSaver
from moe_ckpt.testing import cut
saver = AsyncSaver(sys.argv[1])
saver.save(cut({("w", "master"): np.ones((64, 256, 256))}, 0, 1), step=1, state={})
"""


def test_a_process_that_ends_without_waiting_still_has_its_checkpoint(tmp_path) -> None:
    subprocess.run([sys.executable, "-c", LEFT, str(tmp_path)], check=True)
    path = tmp_path / "step-00000001"
    assert (open_checkpoint(path).read("w") == 1).all()
    verify(path)
