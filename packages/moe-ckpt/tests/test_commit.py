"""Whatever call fails or kills the process, a reader sees the old state or the new one, whole."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from moe_ckpt import (
    CheckpointNotFound,
    RankFailedError,
    RootLockedError,
    StepExistsError,
    files,
    find_latest,
    load,
    open_checkpoint,
    save,
    scan,
    verify,
)
from moe_ckpt.testing import Died, Faults, blank, cut

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
SHAPES = {("w", "master"): (4, 3), ("w", "exp_avg"): (4, 3), ("bias", "master"): (5,)}


def arrays_of(value: float) -> dict[tuple[str, str], np.ndarray]:
    return {key: np.full(shape, value, np.float32) for key, shape in SHAPES.items()}


def put(root: Path, step: int, value: float, **options) -> Path:
    return save(root, cut(arrays_of(value), 0, 1), step=step, state={"value": value}, **options)


def seen(root: Path) -> dict[int, float]:
    """Return the value of every checkpoint a reader sees, each of them verified."""
    values = {}
    for checkpoint in scan(root).valid:
        verify(checkpoint.path)
        shards = blank(cut(arrays_of(0), 0, 1))
        loaded = load(root, shards, step=checkpoint.step)
        [value] = {float(x) for shard in shards for x in shard.data}
        assert loaded.state == {"value": value}
        values[checkpoint.step] = value
    return values


def tidy(root: Path) -> bool:
    return all(name in (".lock", "LATEST") or name.startswith("step-") for name in os.listdir(root))


# Each starts with step 1 and 2, except the first; and ends with what save() is to leave.
SAVES = {
    "first": ({}, {"step": 2, "value": 20.0}, {2: 20.0}),
    "next": ({1: 1.0, 2: 2.0}, {"step": 3, "value": 30.0, "keep": 2}, {2: 2.0, 3: 30.0}),
    "overwrite": (
        {1: 1.0, 2: 2.0},
        {"step": 2, "value": 20.0, "overwrite": True},
        {1: 1.0, 2: 20.0},
    ),
    "only": ({2: 2.0}, {"step": 2, "value": 20.0, "overwrite": True, "keep": 1}, {2: 20.0}),
}


@pytest.fixture(params=SAVES)
def case(request):
    before, action, after = SAVES[request.param]
    # In memory, where it is there: hundreds of saves, each of which waits for the disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        base = Path(directory) / "base"
        base.mkdir()
        for step, value in before.items():
            put(base, step, value)
        yield base, before, action, after


def points(base: Path, action: dict) -> list[int]:
    root = base.with_name("count")
    shutil.copytree(base, root)
    with Faults(0) as faults:
        put(root, **action)
    # By default every point of the commit, which is the end, and some of what comes before.
    every = range(1, faults.count + 1)
    return [k for k in every if NIGHTLY or k % 6 == 0 or k > faults.count - 18]


def test_a_death_at_any_call_leaves_the_old_or_the_new_state(case) -> None:
    base, before, action, after = case
    new = {**before, action["step"]: action["value"]}
    outcomes = set()
    for k in points(base, action):
        root = base.with_name(f"die-{k}")
        shutil.copytree(base, root)
        with Faults(k, dies=True), pytest.raises(Died):
            put(root, **action)
        got = seen(root)
        assert got in (before, new, after), (k, got)
        outcomes.add(tuple(got.items()))
        if got:  # never older than what was committed last
            shards = blank(cut(arrays_of(0), 0, 1))
            assert load(root, shards).step == (action["step"] if got != before else max(before))
        else:
            with pytest.raises(CheckpointNotFound):
                load(root, [])
        put(root, 9, 90.0, keep=None)
        assert seen(root) == {**got, 9: 90.0}
        assert tidy(root), os.listdir(root)
    assert len(outcomes) >= 2


def error_of(root: Path, action: dict) -> RankFailedError | None:
    try:
        put(root, **action)
    except RankFailedError as error:
        return error
    return None


def test_a_failure_of_any_call_raises_and_shows_nothing_or_is_harmless(case) -> None:
    base, before, action, after = case
    raised = 0
    for k in points(base, action):
        root = base.with_name(f"fail-{k}")
        shutil.copytree(base, root)
        with Faults(k, code=errno.ENOSPC):
            error = error_of(root, action)
        got = seen(root)
        if error is None:  # it hit the deletion of something that no reader sees
            assert got in (after, {**before, action["step"]: action["value"]}), (k, got)
        else:
            assert got == before, (k, got)
            assert "No space left on device" in str(error)
            assert isinstance(error.__cause__, OSError)
            raised += 1
        assert not scan(root).skipped
        put(root, 9, 90.0, keep=None)
        assert seen(root) == {**got, 9: 90.0}
        assert tidy(root), os.listdir(root)
    assert raised > 5


KILLED = """
import os, sys
import numpy as np
from moe_ckpt import save
from moe_ckpt.testing import cut
sys.stdout.write("ready\\n")
sys.stdout.flush()
array = np.arange(3_000_000, dtype=np.float32)
for step in range(1, 1000):
    save(sys.argv[1], cut({("w", "master"): array + step}, 0, 1), step=step, state={})
"""


def test_kill_9_at_any_moment_leaves_a_newest_checkpoint_that_is_whole(tmp_path) -> None:
    array = np.arange(3_000_000, dtype=np.float32)
    last = 0
    for tenth in range(12 if NIGHTLY else 3):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED.replace("range(1,", f"range({last + 1},"), str(tmp_path)],
            stdout=subprocess.PIPE,
        )
        with process:
            assert process.stdout.readline() == b"ready\n"
            try:
                process.wait(0.3 + 0.037 * tenth)
            except subprocess.TimeoutExpired:
                process.kill()
        found = find_latest(tmp_path)
        if found is not None:
            assert found.step >= last
            last = found.step
            np.testing.assert_array_equal(open_checkpoint(found.path).read("w"), array + last)
    assert last > 0


FULL = """
import resource, sys
import numpy as np
from moe_ckpt import save
from moe_ckpt.testing import cut
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
save(sys.argv[1], cut({("w", "master"): np.zeros(30_000, np.float32)}, 0, 1), step=2, state={})
"""


def test_a_chunk_that_the_system_refuses_to_write_raises_and_shows_nothing(tmp_path) -> None:
    # RLIMIT_FSIZE stands for a full disk: the write that tensorstore makes fails.
    put(tmp_path, 1, 1.0)
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "RankFailedError" in done.stderr
    assert os.strerror(errno.EFBIG) in done.stderr
    assert seen(tmp_path) == {1: 1.0}
    assert tidy(tmp_path)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_step_is_replaced_only_on_request(tmp_path) -> None:
    put(tmp_path, 7, 1.0)
    with pytest.raises(StepExistsError, match="step-00000007 is there already; overwrite=True"):
        put(tmp_path, 7, 2.0)
    assert seen(tmp_path) == {7: 1.0}
    put(tmp_path, 7, 2.0, overwrite=True)
    assert seen(tmp_path) == {7: 2.0}
    assert tidy(tmp_path)


def test_exchange_without_support_of_the_file_system_ends_in_the_same_state(tmp_path) -> None:
    put(tmp_path, 7, 1.0)

    class Libc:
        @staticmethod
        def renameat2(*_: object) -> int:
            files.ctypes.set_errno(errno.EINVAL)
            return -1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.ctypes, "CDLL", lambda *_, **__: Libc)
        put(tmp_path, 7, 2.0, overwrite=True)
    assert seen(tmp_path) == {7: 2.0}
    assert tidy(tmp_path)


def test_retention_counts_saves_and_not_steps(tmp_path) -> None:
    for step in (100, 200, 300):
        put(tmp_path, step, float(step), keep=2)
    assert set(seen(tmp_path)) == {200, 300}
    # The run went back to 200 and goes on from there: the stale 300 is not the newest any more.
    put(tmp_path, 210, 210.0, keep=2)
    assert set(seen(tmp_path)) == {210, 300}
    assert find_latest(tmp_path).step == 210
    put(tmp_path, 220, 220.0, keep=2)
    assert set(seen(tmp_path)) == {210, 220}


def test_retention_neither_counts_nor_deletes_what_is_damaged_or_foreign(tmp_path) -> None:
    put(tmp_path, 1, 1.0, keep=1)
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-5").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    put(tmp_path, 2, 2.0, keep=1)
    assert seen(tmp_path) == {2: 2.0}
    assert {"step-00000005", "step-5", "notes.txt"} <= set(os.listdir(tmp_path))


def test_a_second_writer_is_refused_by_name_and_a_dead_one_does_not_block(tmp_path) -> None:
    put(tmp_path, 1, 1.0)
    with (
        files.locked(tmp_path, 41),
        pytest.raises(RootLockedError, match=rf'"pid": {os.getpid()}, "step": 41'),
    ):
        put(tmp_path, 2, 2.0)
    put(tmp_path, 2, 2.0)  # the file .lock is still there
    assert seen(tmp_path) == {1: 1.0, 2: 2.0}


def test_a_root_that_cannot_be_written_is_an_error_that_names_it(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RankFailedError, match=f"{tmp_path}/file"):
        put(tmp_path / "file", 1, 1.0)


@pytest.mark.parametrize("options", [{"step": -1}, {"step": 1, "keep": 0}])
def test_senseless_arguments_are_refused(tmp_path, options) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        put(tmp_path, value=1.0, **options)
    assert not os.listdir(tmp_path)


def test_making_a_root_makes_the_directories_above_it() -> None:
    with tempfile.TemporaryDirectory() as top:
        put(Path(top) / "a" / "b", 1, 1.0)
        assert seen(Path(top) / "a" / "b") == {1: 1.0}
