"""What goes wrong on one rank is raised on all of them, and nothing new is seen."""

import errno
import os
import threading
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from moe_ckpt import (
    CheckpointError,
    CorruptChunkError,
    ExtraTensorError,
    MissingTensorError,
    RankFailedError,
    RankMismatchError,
    ShardError,
    StateError,
    assembly,
    load,
    save,
    scan,
)
from moe_ckpt.array import ChunkWriter
from moe_ckpt.testing import apart, blank, cut, run_ranks

ARRAYS = {(name, "master"): np.arange(30, dtype=np.float32) + ord(name) for name in "abcdef"}


@pytest.fixture(autouse=True)
def own_arrays():
    with apart():
        yield


def outcomes(program, size=3):
    def guarded(comm):
        try:
            return program(comm)
        except Exception as error:
            return error

    return run_ranks(size, guarded)


def save_all(root, step=1, change=lambda shards, rank: shards, state=lambda rank: {"a": 1}):
    def program(comm):
        shards = change(cut(ARRAYS, comm.rank, comm.size), comm.rank)
        return save(root, shards, step=step, state=state(comm.rank), comm=comm)

    return outcomes(program)


def same(errors, kind, *parts) -> None:
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    assert len({str(error) for error in errors}) == 1
    for part in parts:
        assert part in str(errors[0])


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("where", ["_parcels", "_write_round", "_stored_crcs", "_check_shared"])
def test_a_rank_that_fails_anywhere_fails_the_save_of_all(tmp_path, rank, where) -> None:
    save_all(tmp_path)
    real, failing = getattr(assembly, where), threading.local()

    def fail(*args):
        if getattr(failing, "rank", None) == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"disk of rank {rank}")
        return real(*args)

    def program(comm):
        failing.rank = comm.rank
        shards = cut(ARRAYS, comm.rank, comm.size)
        return save(tmp_path, shards, step=2, state={}, comm=comm)

    with mock.patch.object(assembly, where, fail):
        errors = outcomes(program)
    same(errors, RankFailedError, f"rank {rank}: OSError", "No space left", f"disk of rank {rank}")
    assert [error.__cause__ is not None for error in errors] == [r == rank for r in range(3)]
    assert errors[0].details == {"rank": rank, "error": "OSError"}
    assert [checkpoint.step for checkpoint in scan(tmp_path).valid] == [1]
    assert not scan(tmp_path).leftovers
    save_all(tmp_path, step=2)
    assert [checkpoint.step for checkpoint in scan(tmp_path).valid] == [2, 1]


def test_an_interrupt_of_one_rank_stops_the_others_too(tmp_path) -> None:
    def interrupt(self, info, number, values):
        if info.name == "a":
            raise KeyboardInterrupt

    def program(comm):
        try:
            return save(tmp_path, cut(ARRAYS, comm.rank, 3), step=1, state={}, comm=comm)
        except BaseException as error:
            return type(error)

    with mock.patch.object(ChunkWriter, "write", interrupt):
        kinds = run_ranks(3, program)
    assert sorted(kind.__name__ for kind in kinds) == [
        "KeyboardInterrupt", "RankFailedError", "RankFailedError"
    ]  # fmt: skip
    assert not scan(tmp_path).valid


def test_a_bad_shard_of_one_rank_is_an_error_of_all(tmp_path) -> None:
    def change(shards, rank):
        if rank == 1:
            shards[0] = replace(shards[0], data=shards[0].data.astype(np.float16))
        return shards

    same(save_all(tmp_path, change=change), ShardError, "rank 1: a/master: data is float16")
    assert not list(tmp_path.iterdir())


def test_arguments_that_differ_are_named(tmp_path) -> None:
    def steps(comm):
        return save(tmp_path, cut(ARRAYS, comm.rank, 3), step=comm.rank // 2, state={}, comm=comm)

    same(outcomes(steps), RankMismatchError, "step is 0 on rank 0 and 1 on rank 2")
    errors = save_all(tmp_path, state=lambda rank: {"a": rank, **({"b": 1} if rank == 1 else {})})
    same(errors, StateError, "['b']", "rank 1")
    assert not list(tmp_path.iterdir())


def test_a_rank_that_sees_another_file_system_is_named(tmp_path) -> None:
    def program(comm):
        root = tmp_path / ("elsewhere" if comm.rank == 1 else "shared")
        return save(root, cut(ARRAYS, comm.rank, 3), step=1, state={}, comm=comm)

    errors = outcomes(program)
    same(errors, CheckpointError, "rank 1: ", "all ranks must see one file system")
    assert not scan(tmp_path / "shared").valid


def test_the_state_of_rank_0_is_the_one_saved(tmp_path) -> None:
    save_all(tmp_path, state=lambda rank: {"seconds": float(rank)})

    def program(comm):
        return load(tmp_path, blank(cut(ARRAYS, comm.rank, 3)), comm=comm).state

    assert outcomes(program) == [{"seconds": 0.0}] * 3


def test_a_load_that_fails_on_one_rank_fails_on_all_and_falls_back_on_all(tmp_path) -> None:
    save_all(tmp_path, 1)
    path = save_all(tmp_path, 2)[0]
    file = path / "arrays" / "c" / "master" / "c.0"
    file.write_bytes(file.read_bytes()[:-9] + bytes(9))

    def newest(comm):
        shards = blank(cut({("c", "master"): ARRAYS["c", "master"]}, 0, 1)) if comm.rank else []
        loaded = load(tmp_path, shards, comm=comm, allow_extra=["*"])
        return loaded.step, len(loaded.skipped), [s.data[0] for s in shards]

    assert outcomes(newest, 2) == [(1, 1, []), (1, 1, [ord("c")])]

    def exactly(comm):
        shards = blank(cut(ARRAYS, comm.rank, 3)) if comm.rank < 2 else []
        return load(tmp_path, shards, comm=comm, step=2)

    same(outcomes(exactly), CorruptChunkError, "tensor c/master, chunk (0,)", str(file))


def test_tensors_are_asked_for_by_the_ranks_together(tmp_path) -> None:
    save_all(tmp_path)

    def half(names):
        def program(comm):
            mine = {key: a for key, a in ARRAYS.items() if key[0] in names[comm.rank]}
            return load(tmp_path, blank(cut(mine, 0, 1)), comm=comm).step

        return outcomes(program, 2)

    assert half(["abc", "def"]) == [1, 1]
    same(half(["abc", "ef"]), ExtraTensorError, "rank 0: ", "holds d/master, which no shard")

    def unknown(comm):
        mine = {**ARRAYS, **({("z", "master"): np.zeros(1, np.float32)} if comm.rank else {})}
        return load(tmp_path, blank(cut(mine, 0, 1)), comm=comm)

    same(outcomes(unknown, 2), MissingTensorError, "rank 1: ", "has no z/master")

    def steps(comm):
        return load(tmp_path, blank(cut(ARRAYS, 0, 1)), comm=comm, step=comm.rank)

    same(outcomes(steps, 2), RankMismatchError, "step is 0 on rank 0 and 1 on rank 1")
