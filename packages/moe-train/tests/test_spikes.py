"""Losses far above the last ones are found, skipped, remembered over a restart, and said."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_train.metrics import read_metrics
from moe_train.spikes import Spikes
from moe_train.trainer import Trainer
from runs import losses, run, tensors

CPU = torch.device("cpu")


def answers(spikes: Spikes, values: list[float]) -> list[bool]:
    return [bool(spikes.judge(torch.tensor(v, dtype=torch.float64))) for v in values]


values = st.lists(
    st.one_of(st.floats(1.0, 3.0), st.sampled_from([50.0, math.nan, math.inf])), max_size=40
)


@given(values=values, window=st.integers(1, 6), threshold=st.floats(0.5, 5))
def test_a_spike_stands_so_many_deviations_above_the_mean_of_a_full_window(
    values, window, threshold
) -> None:
    remembered, want = [], []
    for value in values:
        last = np.array(remembered[-window:])
        full = len(last) == window and math.isfinite(value)
        edge = last.mean() + threshold * last.std() if full else math.inf
        want.append(None if full and abs(value - edge) < 1e-9 else value > edge and full)
        remembered += [value] if math.isfinite(value) else []
    got = answers(Spikes(threshold, window, CPU), values)
    assert [g for g, w in zip(got, want, strict=True) if w is not None] == [
        w for w in want if w is not None
    ]


@given(values=values, cut=st.integers(0, 40))
def test_what_is_kept_goes_on_as_if_nothing_had_happened(values, cut) -> None:
    whole, first, second = (Spikes(1.0, 4, CPU) for _ in range(3))
    want = answers(whole, values)
    got = answers(first, values[:cut])
    second.load(first.losses())
    assert got + answers(second, values[cut:]) == want
    assert second.losses() == whole.losses()


def with_spikes(config):
    return replace(config, train=replace(config.train, skip_spikes=6.0, spike_window=4))


def scaled(trainer: Trainer, factor: float) -> None:
    original = trainer.model.sums

    def sums(*arguments):
        made = original(*arguments)
        return made._replace(cross_entropy=made.cross_entropy * factor)

    trainer.model.sums = sums


def test_a_spike_changes_nothing_but_the_cursor_and_a_new_level_is_accepted(
    tiny_config, trainer_of
) -> None:
    trainer = trainer_of(with_spikes(tiny_config))
    assert not any(bool(trainer.step().skipped) for _ in range(6))
    before = {(s.name, s.kind): s.data.clone() for s in trainer.shards()}
    scaled(trainer, 5.0)
    result = trainer.step()
    assert bool(result.spiked)
    assert bool(result.skipped)
    assert all(torch.equal(s.data, before[s.name, s.kind]) for s in trainer.shards())
    assert (trainer.steps_done, trainer.optimizer.step_count) == (7, 6)
    assert not all(bool(trainer.step().skipped) for _ in range(4))


SPIKES = {"train.skip-spikes": 4.0, "train.spike-window": 4}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("at", [5, 7])
def test_a_spike_is_skipped_alike_in_one_run_and_in_two(
    tmp_path, text_folder, monkeypatch, at
) -> None:
    original = Trainer.step

    def step(trainer: Trainer):
        plain = trainer.model.sums
        if trainer.steps_done == at:
            scaled(trainer, 9.0)
        try:
            return original(trainer)
        finally:
            trainer.model.sums = plain

    monkeypatch.setattr(Trainer, "step", step)
    for _ in range(2):
        assert run(tmp_path / "a", text_folder, **SPIKES) == 0
    assert run(tmp_path / "b", text_folder, **SPIKES | {"train.steps": 12}) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    a, b = tensors(tmp_path / "a", 12), tensors(tmp_path / "b", 12)
    assert all(a[key].tobytes() == b[key].tobytes() for key in a)
    records = [r for r in read_metrics(tmp_path / "a" / "metrics.jsonl") if r["kind"] == "train"]
    spikes = [r["step"] for r in records if r["spikes"]]
    assert spikes == [at + 1]
    assert [r["skipped"] for r in records if r["spikes"]] == [1]
