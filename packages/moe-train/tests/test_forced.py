"""Forced experts are even, recorded ones come back, and nothing else is touched."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_train.config import LogConfig, RoutingConfig
from moe_train.errors import RunError
from moe_train.forced import force, random_experts, uniform_experts

layouts = st.sampled_from(
    [(E, W, K) for E in (4, 8, 12, 256) for W in (1, 2, 4, 16) if E % W == 0 for K in (1, 2, 3, 8)
     if K <= E]
)  # fmt: skip


@settings(max_examples=40)
@given(layouts, st.integers(1, 40))
def test_uniform_counts_differ_by_at_most_one_for_experts_and_for_ranks(layout, T) -> None:
    E, W, K = layout
    total_E = torch.zeros(E, dtype=torch.int64)
    for rank in range(W):
        ids_TK = uniform_experts(T, K, E, rank, W).long()
        assert all(len(set(row)) == K for row in ids_TK.tolist())
        count_E = torch.bincount(ids_TK.flatten(), minlength=E)
        count_W = count_E.view(W, E // W).sum(1)  # experts lie on ranks in blocks
        for count in (count_E, count_W):
            assert count.max() - count.min() <= 1
        total_E += count_E
    assert total_E.max() - total_E.min() <= 1  # not the same prefix on every rank


@given(layouts, st.lists(st.booleans(), min_size=1, max_size=30))
@settings(max_examples=20)
def test_padding_leaves_no_hole_in_uniform_experts(layout, real) -> None:
    E, W, K = layout
    mask_T = torch.tensor(real)
    ids_TK = uniform_experts(len(real), K, E, 0, W, mask_T)
    assert torch.equal((ids_TK >= 0).all(1), mask_T)
    assert torch.equal(ids_TK[mask_T], uniform_experts(sum(real), K, E, 0, W))


def test_random_experts_are_different_ones_and_each_is_drawn_as_often() -> None:
    ids_TK = random_experts(20_000, 2, 8, seed=3)
    assert (ids_TK[:, 0] != ids_TK[:, 1]).all()
    for place in range(2):  # 2,500 each, give or take 47 (one standard deviation)
        count_E = torch.bincount(ids_TK[:, place], minlength=8)
        assert (count_E - 2500).abs().max() < 250
    a, b = (force("random", name, 2, 8, range(8)) for name in ("layers.0", "layers.1"))
    device = torch.device("cpu")
    assert torch.equal(a(50, None, device), a(50, None, device))
    assert not torch.equal(a(50, None, device), b(50, None, device))


@pytest.mark.parametrize("kind", ["uniform", "random"])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_forced_run_sends_rows_where_it_is_told(tiny_config, trainer_of, kind, recompute) -> None:
    config = replace(
        tiny_config,
        routing=RoutingConfig(forced=kind),
        train=replace(tiny_config.train, recompute=recompute),
    )
    trainer = trainer_of(config)
    result = trainer.step()
    T = 8 * 16
    if kind == "uniform":
        assert (result.count_LE == T * 2 // 4).all()
        return
    for i, moe in enumerate(trainer.moes):
        ids_TK = moe.given(T, None, torch.device("cpu"))
        assert torch.equal(torch.bincount(ids_TK.flatten(), minlength=4), result.count_LE[i])


def weights(trainer) -> dict[tuple[str, str], torch.Tensor]:
    return {(s.name, s.kind): s.data.clone() for s in trainer.shards()}


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_replayed_run_is_the_recorded_run_bit_for_bit(
    tiny_config, trainer_of, tmp_path, recompute
) -> None:
    again = recompute != "none"
    train = replace(tiny_config.train, microbatch_size=4, recompute=recompute)
    recorded = replace(tiny_config, train=train, log=LogConfig(record_experts=tmp_path / "tape"))
    replayed = replace(
        tiny_config, train=replace(train, microbatch_size=2 if again else 4),
        routing=RoutingConfig(forced="replay", replay=tmp_path / "tape"),
    )  # fmt: skip
    states = []
    for config in (recorded, replayed):
        trainer = trainer_of(config)
        for step in range(3):
            trainer.step()
            if step == 1:
                trainer.evaluate()  # is neither recorded nor replayed
        trainer.tape.close()
        states.append(weights(trainer))
    for key, want in states[0].items():
        torch.testing.assert_close(states[1][key], want, rtol=1e-9 * again, atol=1e-12 * again)
    # And the ids are obeyed: with those of another model, rows go where that one sent them.
    other = trainer_of(replace(replayed, train=replace(replayed.train, seed=5)))
    natural = trainer_of(replace(tiny_config, train=replace(train, seed=5)))
    assert torch.equal(other.step().count_LE, trainer_of(recorded).step().count_LE)
    assert not torch.equal(natural.step().count_LE, other.step().count_LE)


def test_a_recording_goes_on_where_a_run_went_on(tiny_config, trainer_of, tmp_path) -> None:
    config = replace(tiny_config, log=LogConfig(record_experts=tmp_path / "tape"))
    trainer = trainer_of(config)
    for _ in range(3):
        trainer.step()
    trainer.tape.close()
    whole = (tmp_path / "tape" / "experts.bin").read_bytes()
    again = trainer_of(config)
    again.step()
    again.step()
    again.tape.close()
    assert (tmp_path / "tape" / "experts.bin").read_bytes() == whole  # written again, the same


def test_a_recording_that_does_not_fit_is_refused_by_what_differs(
    tiny_config, trainer_of, tmp_path
) -> None:
    tape = tmp_path / "tape"
    trainer = trainer_of(replace(tiny_config, log=LogConfig(record_experts=tape)))
    trainer.step()
    trainer.tape.close()
    replayed = replace(tiny_config, routing=RoutingConfig(forced="replay", replay=tape))
    with pytest.raises(RunError, match="top_k 2, here 1"):
        trainer_of(replace(replayed, model=replace(replayed.model, top_k=1)))
    with pytest.raises(RunError, match="holds steps 0 to 0, and steps 0 to 5 are to be replayed"):
        trainer_of(replayed).tape.check(0, 6)
    routing = RoutingConfig(forced="replay", replay=tmp_path / "nothing")
    with pytest.raises(RunError, match=r"nothing holds no recording of experts"):
        trainer_of(replace(tiny_config, routing=routing))
    content = bytearray((tape / "experts.bin").read_bytes())
    for damaged in (content[:100] + bytes(8) + content[108:], b"\x04\x00" + content[2:]):
        (tape / "experts.bin").write_bytes(damaged)  # a hole; expert 4 of 4
        trainer = trainer_of(replayed)
        with pytest.raises(RunError, match=r"experts\.bin is damaged: at step 0"):
            trainer.step()
    (tape / "experts.json").write_text("[]")
    with pytest.raises(RunError, match=r"experts\.json is no header of a recording"):
        trainer_of(replayed)
    for settings_ in ({"forced": "replay"}, {"replay": tape}, {"forced": "random", "replay": tape}):
        with pytest.raises(ValueError, match="do not fit: forced replay needs"):
            RoutingConfig(**settings_)
