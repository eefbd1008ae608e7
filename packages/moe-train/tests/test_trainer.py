"""A step is the same mathematics however the batch is cut."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from moe_kernels import update_bias
from moe_train.config import OptimizerConfig, RoutingConfig
from moe_train.data import IGNORED, Batch, Sequences


def state_of(trainer) -> dict[tuple[str, str], torch.Tensor]:
    return {(s.name, s.kind): s.data.clone() for s in trainer.shards()}


def assert_same_state(a, b, rtol: float) -> None:
    first, second = state_of(a), state_of(b)
    assert first.keys() == second.keys()
    for key, want in first.items():
        torch.testing.assert_close(second[key], want, rtol=rtol, atol=rtol * 1e-2)


class Padded(Sequences):
    """Sequences of which odd ones have one real token and even ones have all."""

    def batch(self, numbers, device=None) -> Batch:
        batch = super().batch(np.sort(numbers), device)
        targets = batch.targets_BS.clone()
        targets[::2, 1:] = IGNORED
        return Batch(batch.inputs_BS, targets, padded=True)


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_microbatches_change_no_gradient_and_no_logged_value(
    tiny_config, trainer_of, micro, padded
) -> None:
    routing = RoutingConfig(balance=0.1, z=0.01, bias=True, bias_rate=0.01)
    whole = replace(tiny_config, routing=routing)
    cut = replace(whole, train=replace(whole.train, microbatch_size=micro))
    trainers = trainer_of(whole), trainer_of(cut)
    for step in range(3):
        results = []
        for trainer in trainers:
            if padded:
                trainer.train_sequences = Padded(trainer.train_sequences.tokens, 16)
            results.append(trainer.step())
        for name, want, got in zip(results[0]._fields, *results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=f"{name} {step}")
    assert_same_state(*trainers, rtol=1e-8)


def test_bias_moves_once_a_step_from_the_counts_of_the_whole_batch(tiny_config, trainer_of) -> None:
    config = replace(
        tiny_config,
        routing=RoutingConfig(bias=True, bias_rate=0.01),
        train=replace(tiny_config.train, microbatch_size=2),
    )
    trainer = trainer_of(config)
    for _ in range(3):
        before = trainer.bias_LE.clone()
        result = trainer.step()
        rows = config.train.batch_size * 16 * config.model.top_k
        count_LE = (result.load_LE * rows).round().long()
        want = [update_bias(b, n, 0.01) for b, n in zip(before, count_LE, strict=True)]
        assert torch.equal(trainer.bias_LE, torch.stack(want))
    assert trainer.bias_LE.abs().max() > 0


def test_validation_changes_nothing(tiny_config, trainer_of) -> None:
    config = replace(tiny_config, routing=RoutingConfig(bias=True, bias_rate=0.01))
    a, b = trainer_of(config), trainer_of(config)
    for _ in range(2):
        a.step()
        b.step()
        assert b.evaluate() == b.evaluate()
    assert_same_state(a, b, rtol=0)


def test_loss_before_an_update_is_the_validation_loss_of_that_batch(
    tiny_config, trainer_of
) -> None:
    trainer = trainer_of(replace(tiny_config, train=replace(tiny_config.train, batch_size=4)))
    trainer.step()
    batch = trainer._request().batch()
    same = Sequences(np.zeros(4 * 16 + 1, np.uint8), 16)
    same.batch = lambda numbers, device=None: batch  # the four sequences, in one piece
    trainer.held_out = same
    loss, tokens = trainer.evaluate()
    assert tokens == 4 * 16
    assert loss == pytest.approx(float(trainer.step().loss), rel=1e-12)


def test_every_expert_that_gets_rows_learns(tiny_config, trainer_of) -> None:
    trainer = trainer_of(tiny_config)
    names = [n for n, _ in trainer.model.named_parameters() if n.endswith(("gate_up", "down"))]
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    used = torch.zeros(2, 4)
    for _ in range(2):  # the head starts at zero, so in the first step only the head moves
        used += trainer.step().load_LE.sign()
    assert used.min() == 2
    after = dict(trainer.model.named_parameters())
    for name in names:
        for old, new in zip(before[name], after[name], strict=True):
            assert (old != new).any(), name


def test_a_gradient_that_is_not_finite_changes_nothing_but_the_cursor(
    tiny_config, trainer_of
) -> None:
    trainer = trainer_of(replace(tiny_config, routing=RoutingConfig(bias=True, bias_rate=0.01)))
    trainer.step()
    before = state_of(trainer)
    original = trainer.model.sums
    trainer.model.sums = lambda *a: original(*a)._replace(
        cross_entropy=original(*a).cross_entropy * torch.nan
    )
    result = trainer.step()
    trainer.model.sums = original
    assert bool(result.skipped)
    assert torch.isnan(result.loss)
    for key, value in state_of(trainer).items():
        assert torch.equal(value, before[key]), key
    assert (trainer.steps_done, trainer.optimizer.step_count, trainer.samples_seen) == (2, 1, 16)
    assert not bool(trainer.step().skipped)


def test_rate_rises_linearly_and_then_stays(tiny_config, trainer_of) -> None:
    optimizer = OptimizerConfig(lr=0.5, warmup_steps=4)
    trainer = trainer_of(replace(tiny_config, optimizer=optimizer))
    rates = [trainer.learning_rate(step) for step in range(7)]
    assert rates == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5]


def test_training_learns(tiny_config, trainer_of) -> None:
    trainer = trainer_of(tiny_config)
    losses = [float(trainer.step().loss) for _ in range(60)]
    assert losses[-1] < 0.6 * losses[0]
