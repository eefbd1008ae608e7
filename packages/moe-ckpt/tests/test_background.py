"""A save in the background holds what was there when it was asked for, and no failure is lost."""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from moe_ckpt import (
    AsyncSaver,
    CoverageError,
    HostArena,
    HostMemoryError,
    RankFailedError,
    ShardError,
    StateError,
    StepExistsError,
    assembly,
    background,
    open_checkpoint,
    save,
    scan,
    verify,
)
from moe_ckpt.testing import ArrayShard, apart, cut, run_ranks
from moe_ckpt.torch_adapter import PinnedArena, background_communicator

KINDS = ("master", "exp_avg", "exp_avg_sq")


def state_of(value: float) -> dict[tuple[str, str], np.ndarray]:
    return {
        (name, kind): np.full((2, 3), value + 10 * at + len(name), np.float32)
        for at, kind in enumerate(KINDS)
        for name in ("w", "layers.0.w")
    }


def held(path: Path) -> dict[tuple[str, str], np.ndarray]:
    reader = open_checkpoint(path)
    return {(n, k): reader.read(n, k) for n in reader.names for k in reader.kinds(n)}


def equal(got: dict[tuple[str, str], np.ndarray], want: dict[tuple[str, str], np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for key, array in want.items():
        assert got[key].tobytes() == array.tobytes(), key


@contextmanager
def gate():
    """Hold every thread before it looks at anything, until the event is set."""
    opened, real = threading.Event(), background.save_views

    def wait(*args):
        assert opened.wait(30)
        return real(*args)

    with mock.patch.object(background, "save_views", wait):
        try:
            yield opened
        finally:
            opened.set()


@contextmanager
def broken(where: str = "_write_round", on: Callable[[], bool] = lambda: True):
    real = getattr(assembly, where)

    def fail(*args):
        if on():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a full disk")
        return real(*args)

    with mock.patch.object(assembly, where, fail):
        yield


def as_tensors(shards: list[ArrayShard]) -> list[ArrayShard]:
    return [
        ArrayShard(*(getattr(s, f.name) for f in fields(s)[:-1]), torch.from_numpy(s.data))
        for s in shards
    ]


ARENAS = {"numpy": (HostArena, list), "torch": (PinnedArena, as_tensors)}


@pytest.mark.parametrize("arena", ARENAS)
def test_values_changed_right_after_the_call_are_not_in_the_file(tmp_path, arena) -> None:
    buffer, shards_of = ARENAS[arena]
    live, state = state_of(1), {"lr": [0.5], "nested": {"cursor": 3}}
    with gate() as opened, AsyncSaver(tmp_path, buffer=buffer()) as saver:
        saver.save(shards_of(cut(live, 0, 1)), step=1, state=state)
        for array in live.values():
            array[:] = -1
        state["lr"][0], state["nested"]["cursor"] = 9.0, 9
        assert saver.busy
        opened.set()
        path = saver.wait()
    equal(held(path), state_of(1))
    assert open_checkpoint(path).state == {"lr": [0.5], "nested": {"cursor": 3}}


@pytest.mark.parametrize("arena", ARENAS)
def test_storages_that_moved_between_saves_are_followed(tmp_path, arena) -> None:
    buffer, shards_of = ARENAS[arena]
    with AsyncSaver(tmp_path, buffer=buffer()) as saver:
        saver.save(shards_of(cut(state_of(1), 0, 1)), step=1, state={})
        # All at other addresses, of other sizes and in another order, as after a reallocation.
        moved = {("head", "master"): np.ones(100), **dict(reversed(state_of(2).items()))}
        saver.save(shards_of(cut(moved, 0, 1)), step=2, state={})
        paths = [saver.wait(), tmp_path / "step-00000001"]
    equal(held(paths[0]), moved)
    equal(held(paths[1]), state_of(1))


@pytest.mark.parametrize("call", ["check", "wait", "save", "close", "exit"])
def test_a_failure_surfaces_at_the_next_call_whichever_it_is(tmp_path, call, caplog) -> None:
    save(tmp_path, cut(state_of(1), 0, 1), step=1, state={})
    saver = AsyncSaver(tmp_path)

    def leave() -> None:
        with saver:
            pass

    with broken():
        saver.save(cut(state_of(2), 0, 1), step=2, state={})
        saver._thread.join()
    calls = {"exit": leave, "save": lambda: saver.save(cut(state_of(3), 0, 1), step=3, state={})}
    with pytest.raises(RankFailedError, match="No space left on device") as caught:
        calls.get(call, getattr(saver, call, None))()
    assert "from the save of step 2" in caught.value.__notes__[0]
    assert "step 2 in the background failed" in caplog.text
    # Raised once, and nothing of step 2 or of the call that raised is there; saving goes on.
    saver.check()
    assert [checkpoint.step for checkpoint in scan(tmp_path).valid] == [1]
    assert not scan(tmp_path).leftovers
    saver.save(cut(state_of(4), 0, 1), step=4, state={})
    equal(held(saver.wait()), state_of(4))


def test_a_check_never_waits_and_the_next_save_does(tmp_path) -> None:
    with gate() as opened, AsyncSaver(tmp_path) as saver:
        assert saver.wait() is None
        saver.save(cut(state_of(1), 0, 1), step=1, state={})
        saver.check()
        assert saver.busy
        threading.Timer(0.2, opened.set).start()
        saver.save(cut(state_of(2), 0, 1), step=2, state={})
        assert opened.is_set()
        assert (tmp_path / "step-00000001").exists()
    assert [checkpoint.step for checkpoint in scan(tmp_path).valid] == [2, 1]


def test_what_this_rank_got_wrong_is_raised_at_once_and_nothing_is_begun(tmp_path) -> None:
    good = cut(state_of(1), 0, 1)
    half = [ArrayShard("h", "master", (2,), 0, 2, np.zeros(2, np.float16))]
    saver = AsyncSaver(tmp_path / "run", buffer=HostArena(limit=400))
    with pytest.raises(ShardError, match="float16"):
        saver.save(half, step=1, state={})
    with pytest.raises(StateError, match=r"state\.x is a set"):
        saver.save(good, step=1, state={"x": {1}})
    with pytest.raises(ValueError, match="must be at least 0, it is -1"):
        saver.save(good, step=-1, state={})
    large = cut({("w", "master"): np.zeros(101, np.float32)}, 0, 1)
    with pytest.raises(
        HostMemoryError, match="takes 448 bytes of host memory and 400 are"
    ) as caught:
        saver.save(large, step=1, state={})
    assert caught.value.details == {"nbytes": 448, "limit": 400}
    assert not (tmp_path / "run").exists()
    saver.save(good, step=1, state={})
    equal(held(saver.wait()), state_of(1))
    saver.save(good, step=1, state={})
    with pytest.raises(StepExistsError):
        saver.wait()


def outcome(work):
    try:
        return work()
    except Exception as error:
        return error


def test_ranks_save_in_the_background_while_they_go_on(tmp_path) -> None:
    def program(comm):
        saver, paths = AsyncSaver(tmp_path, comm=comm, keep=None), []
        live = state_of(0)
        for step in range(1, 6):
            for key, array in state_of(step).items():
                live[key][:] = array
            saver.save(cut(live, comm.rank, comm.size), step=step, state={"step": step})
            for array in live.values():
                array[:] = np.nan
            saver.check()
        paths.append(saver.wait())
        saver.close()
        return paths

    run_ranks(3, program)
    for step in range(1, 6):
        path = tmp_path / f"step-0000000{step}"
        equal(held(path), state_of(step))
        verify(path)
        assert open_checkpoint(path).state == {"step": step}


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failure_of_one_rank_surfaces_on_all_no_later_than_the_next_save(tmp_path, rank) -> None:
    failing = {f"save of step 1 on {rank}"}

    def program(comm):
        saver = AsyncSaver(tmp_path, comm=comm)
        saver.save(cut(state_of(1), comm.rank, comm.size), step=1, state={})
        if saver._thread is not None:
            saver._thread.name = f"save of step 1 on {comm.rank}"
        first = outcome(lambda: saver.save(cut(state_of(2), comm.rank, 3), step=2, state={}))
        saver.save(cut(state_of(3), comm.rank, comm.size), step=3, state={})
        return first, saver.wait()

    with broken("_stored_crcs", lambda: threading.current_thread().name in failing), apart():
        results = run_ranks(3, program)
    assert [type(first) for first, _ in results] == [RankFailedError] * 3
    assert all(f"rank {rank}: OSError" in str(first) for first, _ in results)
    assert [checkpoint.step for checkpoint in scan(tmp_path).valid] == [3]


def test_a_rank_whose_shards_are_refused_does_not_leave_the_others_waiting(tmp_path) -> None:
    def program(comm):
        saver = AsyncSaver(tmp_path, comm=comm)
        shards = cut(state_of(1), comm.rank, comm.size)
        if comm.rank == 1:
            bad = ArrayShard("w", "master", (2, 3), 2, 4, np.zeros(2, np.int32))
            first = outcome(lambda: saver.save([bad], step=1, state={}))
        else:
            saver.save(shards, step=1, state={})
            first = outcome(saver.wait)
        saver.save(shards, step=2, state={})
        return first, saver.wait()

    results = run_ranks(3, program)
    assert [type(first) for first, _ in results] == [ShardError] * 3
    assert all("int32" in str(first) for first, _ in results)
    assert [checkpoint.step for checkpoint in scan(tmp_path).valid] == [2]


def test_ranks_whose_shards_do_not_fit_together_fail_together(tmp_path) -> None:
    def program(comm):
        saver = AsyncSaver(tmp_path, comm=comm)
        saver.save(cut(state_of(1), comm.rank, comm.size + 1), step=1, state={})
        return outcome(saver.wait)

    assert [type(error) for error in run_ranks(2, program)] == [CoverageError] * 2


def distributed(group, root: str) -> list[str]:
    """Save in the background while the default group is busy with sums of its own."""
    comm = background_communicator(group)
    paths = []
    with AsyncSaver(root, comm=comm, buffer=PinnedArena(), keep=None) as saver:
        for step in range(1, 4):
            live = as_tensors(cut(state_of(step), comm.rank, comm.size))
            saver.save(live, step=step, state={})
            for shard in live:
                shard.data.fill_(-1)
            sums = [torch.ones(1000) * comm.rank for _ in range(20)]
            for part in sums:
                torch.distributed.all_reduce(part, group=group)
            assert all((part == sum(range(comm.size))).all() for part in sums)
            saver.check()
        paths.append(str(saver.wait()))
    return paths


def test_torch_ranks_save_while_their_group_communicates(pool, tmp_path) -> None:
    pool.run(distributed, 4, str(tmp_path))
    for step in range(1, 4):
        equal(held(tmp_path / f"step-0000000{step}"), state_of(step))


def test_an_error_on_its_way_out_is_not_hidden_by_that_of_a_save(tmp_path) -> None:
    def train() -> None:
        with AsyncSaver(tmp_path) as saver:
            saver.save(cut(state_of(1), 0, 1), step=1, state={})
            raise KeyError("the loss is not finite")

    with broken(), pytest.raises(KeyError) as caught:
        train()
    assert "No space left on device" in "".join(caught.value.__notes__)


@pytest.mark.gpu
def test_what_is_queued_after_the_call_does_not_change_the_file(tmp_path) -> None:
    live = {
        (name, "master"): torch.full((1 << 22,), at, device="cuda", dtype=torch.float32)
        for at, name in enumerate("abcdefgh")
    }
    shards = [ArrayShard(*key, (1 << 22,), 0, 1 << 22, t) for key, t in live.items()]
    with AsyncSaver(tmp_path, buffer=PinnedArena()) as saver:
        for step in range(3):
            saver.save(shards, step=step, state={})
            for tensor in live.values():
                tensor.add_(100)  # queued, not waited for
            got = held(saver.wait())
            for at, key in enumerate(live):
                assert (got[key] == at + 100 * step).all()
