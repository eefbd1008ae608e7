"""A state machine: whatever is saved, interrupted and deleted, a reader sees what is committed."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from moe_ckpt import (
    CheckpointNotFound,
    RankFailedError,
    StepExistsError,
    find_latest,
    load,
    save,
    scan,
)
from moe_ckpt.testing import Died, Faults, blank, cut

steps = st.integers(0, 4)
values = st.integers(-9, 9)
keeps = st.none() | st.integers(1, 3)


def arrays_of(value: float):
    return {
        ("w", "master"): np.full(3, value, np.float32),
        ("b", "exp_avg"): np.full((), float(value)),
    }


class RootMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # In memory, where it is there: hundreds of saves, each of which waits for the disk.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.root = Path(tempfile.mkdtemp(dir=memory))
        self.model: list[tuple[int, float]] = []  # step and value, in order of commit

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def save(self, step: int, value: float, keep: int | None) -> None:
        shards = cut(arrays_of(value), 0, 1)
        save(self.root, shards, step=step, state={"v": value}, keep=keep, overwrite=True)

    def after(self, step: int, value: float) -> list[tuple[int, float]]:
        return [*(item for item in self.model if item[0] != step), (step, value)]

    def seen(self) -> list[tuple[int, float]]:
        found = []
        for checkpoint in reversed(scan(self.root).valid):
            shards = blank(cut(arrays_of(0), 0, 1))
            loaded = load(self.root, shards, step=checkpoint.step)
            [value] = {float(x) for shard in shards for x in shard.data}
            assert loaded.state == {"v": value}
            found.append((checkpoint.step, value))
        return found

    @rule(step=steps, value=values, keep=keeps)
    def save_one(self, step, value, keep) -> None:
        self.save(step, value, keep)
        self.model = self.after(step, value)[-(keep or 99) :]

    @precondition(lambda self: self.model)
    @rule(value=values)
    def save_what_is_there(self, value) -> None:
        shards = cut(arrays_of(value), 0, 1)
        with pytest.raises(StepExistsError):
            save(self.root, shards, step=self.model[0][0], state={"v": value})

    @rule(step=steps, value=values, keep=keeps, at=st.integers(1, 60))
    def crash_while_saving(self, step, value, keep, at) -> None:
        try:
            with Faults(at, dies=True):
                self.save(step, value, keep)
        except Died:
            seen, new = self.seen(), self.after(step, value)
            if seen != self.model:
                assert seen[-1] == (step, value)
                assert seen == [item for item in new if item in seen]
                assert set(new[-(keep or 99) :]) <= set(seen)
                self.model = seen
        else:
            self.model = self.after(step, value)[-(keep or 99) :]

    @rule(step=steps, value=values, at=st.integers(1, 60))
    def fail_while_saving(self, step, value, at) -> None:
        try:
            with Faults(at):
                self.save(step, value, None)
        except RankFailedError:
            pass
        else:
            self.model = self.after(step, value)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data) -> None:
        step, value = data.draw(st.sampled_from(self.model))
        shutil.rmtree(self.root / f"step-{step:08d}")
        self.model.remove((step, value))

    @invariant()
    def a_reader_sees_exactly_what_is_committed(self) -> None:
        assert self.seen() == self.model
        latest = find_latest(self.root)
        shards = blank(cut(arrays_of(0), 0, 1))
        if self.model:
            assert latest.step == load(self.root, shards).step == self.model[-1][0]
            assert shards[0].data[0] == self.model[-1][1]
        else:
            assert latest is None
            with pytest.raises(CheckpointNotFound):
                load(self.root, shards)


RootMachine.TestCase.settings = settings(stateful_step_count=12)
TestRoot = RootMachine.TestCase
