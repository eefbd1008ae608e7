"""Averages of the weights follow them exactly, come back exactly, and disturb nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from moe_train.metrics import read_metrics
from runs import losses, run, tensors

DECAY = 0.75


def with_ema(config, **train):
    return replace(config, train=replace(config.train, ema=DECAY, **train))


def kind(trainer, name: str) -> dict[str, torch.Tensor]:
    return {s.name: s.data.clone() for s in trainer.shards() if s.kind == name}


def test_averages_are_those_of_the_formula(tiny_config, trainer_of) -> None:
    trainer = trainer_of(with_ema(tiny_config))
    want = kind(trainer, "master")
    for _ in range(4):
        trainer.step()
        for name, weight in kind(trainer, "master").items():
            want[name] = DECAY * want[name] + (1 - DECAY) * weight
    got = kind(trainer, "ema")
    assert got.keys() == want.keys()
    for name, average in want.items():
        torch.testing.assert_close(got[name], average, rtol=1e-12, atol=1e-14)
    assert not torch.equal(got["head"], kind(trainer, "master")["head"])


def test_averages_change_no_weight(tiny_config, trainer_of) -> None:
    plain, averaged = trainer_of(tiny_config), trainer_of(with_ema(tiny_config))
    for trainer in (plain, averaged):
        for _ in range(3):
            trainer.step()
    want, got = kind(plain, "master"), kind(averaged, "master")
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_skipped_step_moves_no_average(tiny_config, trainer_of) -> None:
    trainer = trainer_of(with_ema(tiny_config))
    trainer.step()
    before = kind(trainer, "ema")
    original = trainer.model.sums
    trainer.model.sums = lambda *a: original(*a)._replace(
        cross_entropy=original(*a).cross_entropy * torch.nan
    )
    assert bool(trainer.step().skipped)
    assert all(torch.equal(value, before[name]) for name, value in kind(trainer, "ema").items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_use_the_model_computes_with_averages_and_gets_its_weights_back(
    tiny_config, trainer_of, dtype
) -> None:
    trainer = trainer_of(with_ema(tiny_config, dtype=dtype))
    for _ in range(4):
        trainer.step()
    state = {(s.name, s.kind): s.data.clone() for s in trainer.shards()}
    loss = trainer.evaluate()
    with trainer.averages.in_use():
        for name, parameter in trainer.model.named_parameters():
            want = state[name, "ema"].view(parameter.shape).to(parameter.dtype)
            assert torch.equal(parameter.detach(), want), name
        averaged = trainer.evaluate()
    assert averaged != loss
    assert trainer.evaluate() == loss
    assert all(torch.equal(s.data, state[s.name, s.kind]) for s in trainer.shards())


EMA = {"train.ema": DECAY, "train.eval-ema": True, "train.save-every": 0}


@pytest.mark.usefixtures("alone")
def test_a_continued_average_is_that_of_one_run_bit_for_bit(tmp_path, text_folder) -> None:
    for _ in range(2):
        assert run(tmp_path / "a", text_folder, **EMA) == 0
    assert run(tmp_path / "b", text_folder, **EMA | {"train.steps": 12}) == 0
    a, b = tensors(tmp_path / "a", 12), tensors(tmp_path / "b", 12)
    assert ("head", "ema") in a
    assert all(a[key].tobytes() == b[key].tobytes() for key in a)
    ends = [
        [r for r in read_metrics(f / "metrics.jsonl") if r["kind"] == "eval"][-1]
        for f in (tmp_path / "a", tmp_path / "b")
    ]
    assert ends[0] == ends[1]
    assert ends[0]["ema_loss"] != ends[0]["loss"]


@pytest.mark.usefixtures("alone")
def test_an_average_can_be_begun_and_given_up_and_both_are_said(
    tmp_path, text_folder, capsys
) -> None:
    run(tmp_path / "a", text_folder)
    run(tmp_path / "a", text_folder, **{"train.ema": DECAY, "train.steps": 1})
    assert "the average of the weights begins from those of step 6" in capsys.readouterr().out
    before, after = tensors(tmp_path / "a", 6), tensors(tmp_path / "a", 7)
    want = DECAY * before["head", "master"] + (1 - DECAY) * after["head", "master"]
    np.testing.assert_allclose(after["head", "ema"], want, rtol=1e-5, atol=1e-8)
    run(tmp_path / "a", text_folder, **{"train.steps": 1})
    assert "the average of the weights is given up" in capsys.readouterr().out
    assert {kind for _, kind in tensors(tmp_path / "a", 8)} == {
        "master", "exp_avg", "exp_avg_sq", "buffer",
    }  # fmt: skip
    assert len(losses(tmp_path / "a")) == 8
