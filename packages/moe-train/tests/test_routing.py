"""What keeps the load even is charged once, for the right tokens, in every split of a batch."""

from dataclasses import replace

import pytest
import torch
from moe_kernels import balance_loss, distance_loss
from moe_train.config import RoutingConfig, RunConfig
from moe_train.data import Batch, Sequences

FORMS = ["product", "distance"]


def routed(config: RunConfig, micro: int = 0, **routing) -> RunConfig:
    return replace(
        config,
        routing=RoutingConfig(balance=0.5, **routing),
        train=replace(config.train, microbatch_size=micro),
    )


def router_gradients(trainer) -> list[torch.Tensor]:
    """Take two steps, as the head starts at zero, and return the first moments of the routers."""
    for _ in range(2):
        trainer.step()
    return [
        s.data.clone()
        for s in trainer.shards()
        if s.kind == "exp_avg" and s.name.endswith("router")
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("over", ["sequence", "global", "microbatch"])
def test_the_split_changes_the_gradient_of_a_microbatch_balance_alone(
    tiny_config, trainer_of, form, over
) -> None:
    routing = {"balance_over": over, "balance_form": form}
    whole, cut = (router_gradients(trainer_of(routed(tiny_config, m, **routing))) for m in (0, 2))
    largest = max(float((a - b).abs().max()) for a, b in zip(whole, cut, strict=True))
    scale = max(float(a.abs().max()) for a in whole)
    assert (largest > 1e-4 * scale) == (over == "microbatch")


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"balance_over": "global"}, 1.0),
        ({"balance_over": "global", "balance_form": "distance"}, 0.0),
    ],
)
def test_the_global_load_is_even_before_the_first_step(
    tiny_config, trainer_of, changes, value
) -> None:
    trainer = trainer_of(routed(tiny_config, **changes))
    assert torch.equal(trainer.load_LE, torch.full((2, 4), 0.25, dtype=torch.float64))
    assert float(trainer.step().balance_loss) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_the_global_loss_is_that_of_the_load_one_step_before(tiny_config, trainer_of, form) -> None:
    trainer = trainer_of(routed(tiny_config, 2, balance_over="global", balance_form=form))
    load_LE = trainer.step().load_LE
    assert load_LE.std() > 0
    assert torch.equal(trainer.load_LE, load_LE)
    result = trainer.step()
    tokens = tiny_config.train.batch_size * 16
    if form == "product":
        want = 4 * (load_LE * result.share_LE / tokens).sum(1).mean()
    else:
        want = 4 * (load_LE - 0.25).square().sum(1).mean()
    torch.testing.assert_close(result.balance_loss, want)


@pytest.mark.parametrize(("form", "loss"), [("product", balance_loss), ("distance", distance_loss)])
@pytest.mark.parametrize("over", ["sequence", "microbatch"])
def test_what_is_logged_is_the_mean_over_tokens_and_layers(
    tiny_config, trainer_of, monkeypatch, form, loss, over
) -> None:
    seen = []

    def spy(score_TE, expert_TK, **options):
        options["tokens_per_sequence"] = 16 if over == "sequence" else None
        seen.append(loss(score_TE, expert_TK, **options).detach())
        return loss(score_TE, expert_TK, **options)

    monkeypatch.setattr(f"moe_train.router.{loss.__name__}", spy)
    trainer = trainer_of(routed(tiny_config, 4, balance_over=over, balance_form=form))
    result = trainer.step()
    tokens = tiny_config.train.batch_size * 16
    assert len(seen) == 2 * 2  # microbatches and layers
    torch.testing.assert_close(result.balance_loss, torch.stack(seen).sum() / tokens / 2)


class HalfPadded(Sequences):
    """Every sequence once as it is, and once of nothing but padding."""

    def batch(self, numbers, device=None) -> Batch:
        batch = super().batch(numbers, device)
        nothing = torch.full_like(batch.targets_BS, -100)
        return Batch(
            torch.cat([batch.inputs_BS, batch.inputs_BS.flip(1)]),
            torch.cat([batch.targets_BS, nothing]),
            padded=True,
        )


@pytest.mark.parametrize("over", ["sequence", "global", "microbatch"])
@pytest.mark.parametrize("form", FORMS)
def test_as_much_padding_again_changes_nothing(tiny_config, trainer_of, over, form) -> None:
    config = routed(
        tiny_config, balance_over=over, balance_form=form, z=0.1, bias=True, bias_rate=0.1
    )
    plain, padded = trainer_of(config), trainer_of(config)
    padded.train_sequences = HalfPadded(padded.train_sequences.tokens, 16)
    for _ in range(3):
        want, got = plain.step(), padded.step()
        for name in want._fields:
            torch.testing.assert_close(
                getattr(got, name), getattr(want, name), rtol=1e-9, atol=1e-11, msg=name
            )
    assert torch.equal(plain.bias_LE, padded.bias_LE)
    assert torch.equal(plain.load_LE, padded.load_LE)


def test_a_validation_leaves_the_load_as_it_was(tiny_config, trainer_of) -> None:
    trainer = trainer_of(routed(tiny_config, balance_over="global"))
    trainer.step()
    before = trainer.load_LE.clone()
    trainer.evaluate()
    assert torch.equal(trainer.load_LE, before)


def test_a_skipped_step_leaves_the_load_as_it_was(tiny_config, trainer_of) -> None:
    trainer = trainer_of(routed(tiny_config, balance_over="global"))
    trainer.step()
    before, original = trainer.load_LE.clone(), trainer.model.sums
    trainer.model.sums = lambda *a: original(*a)._replace(
        cross_entropy=original(*a).cross_entropy * torch.nan
    )
    assert bool(trainer.step().skipped)
    assert torch.equal(trainer.load_LE, before)


def test_a_continued_run_has_the_load_of_the_step_before(tiny_config, trainer_of) -> None:
    config = routed(tiny_config, balance_over="global")
    straight, first, second = (trainer_of(config) for _ in range(3))
    for trainer in (straight, first):
        trainer.step()
        trainer.step()
    saved = {(s.name, s.kind): s.data.clone() for s in first.shards()}
    for shard in second.shards():
        shard.data.copy_(saved[shard.name, shard.kind])
    second.loaded(steps_done=2, samples_seen=16, step_count=2)
    assert torch.equal(second.step().balance_loss, straight.step().balance_loss)
    names = [s.name for s in trainer_of(tiny_config).shards()]
    assert not [name for name in names if name.endswith("router_load")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_routers_and_their_state_are_never_narrower_than_float32(
    tiny_config, trainer_of, dtype
) -> None:
    trainer = trainer_of(replace(tiny_config, train=replace(tiny_config.train, dtype=dtype)))
    seen = []
    for moe in trainer.moes:
        assert moe.router.dtype == moe.load_E.dtype == trainer.bias_LE.dtype == torch.float32
        moe.register_forward_hook(lambda _, __, output: seen.append(output[1]))
    trainer.step()
    for stats in seen:
        assert {stats.balance.dtype, stats.z.dtype, stats.share_E.dtype} == {torch.float32}
