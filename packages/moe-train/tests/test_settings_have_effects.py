"""Every setting that a run computes with changes what it computes."""

from dataclasses import fields, replace

import pytest
import torch
from moe_train.config import OptimizerConfig, RoutingConfig
from moe_train.config.kinds import harmless
from moe_train.model import Block
from moe_train.parameters import param_specs

EFFECTS = [
    ("model", "top_k", 1),
    ("model", "qk_norm", "none"),
    ("model", "qk_norm", "together"),
    ("model", "rope_theta", 100.0),
    ("model", "norm_eps", 0.01),
    ("routing", "score", "sigmoid"),
    ("routing", "renormalize", False),
    ("routing", "num_groups", 1),
    ("routing", "top_groups", 2),
    ("routing", "scale", 2.0),
    ("routing", "balance", 1.0),
    ("routing", "balance_over", "global"),
    ("routing", "balance_form", "distance"),
    ("routing", "forced", "uniform"),
    ("routing", "z", 0.1),
    ("routing", "bias", False),
    ("routing", "bias_rate", 0.03),
    ("optimizer", "lr", 0.01),
    ("optimizer", "schedule", "cosine"),
    ("optimizer", "warmup_steps", 1),
    ("optimizer", "total_steps", 9),
    ("optimizer", "decay_steps", 1),
    ("optimizer", "floor", 0.5),
    ("optimizer", "rule", "muon"),
    ("optimizer", "expert_lr", 0.5),
    ("optimizer", "router_lr", 0.5),
    ("optimizer", "embedding_lr", 0.5),
    ("optimizer", "beta1", 0.5),
    ("optimizer", "beta2", 0.5),
    ("optimizer", "eps", 0.001),
    ("optimizer", "weight_decay", 0.5),
    ("optimizer", "max_norm", 0.001),
    ("data", "seed", 1),
    ("data", "packing", "documents"),
    ("data", "sequence_length", 8),
    ("train", "seed", 1),
    ("train", "batch_size", 4),
]


def weights_after_four_steps(trainer) -> dict[str, torch.Tensor]:
    for _ in range(4):  # the head starts at zero, so only the second step moves the rest
        trainer.step()
    return {s.name: s.data.clone() for s in trainer.shards() if s.kind == "master"}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def config(tiny_config):
    return replace(
        tiny_config,
        routing=RoutingConfig(
            num_groups=2, top_groups=1, balance=0.1, z=0.01, bias=True, bias_rate=0.3
        ),
        train=replace(tiny_config.train, ema=0.5),
        optimizer=OptimizerConfig(
            warmup_steps=2, schedule="wsd", total_steps=5, decay_steps=3, floor=0.1
        ),
    )


@pytest.mark.parametrize(("section", "name", "value"), EFFECTS)
def test_a_setting_changes_the_weights(config, trainer_of, section, name, value) -> None:
    changed = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    one, other = (weights_after_four_steps(trainer_of(c)) for c in (config, changed))
    assert not same(one, other)


def test_without_a_change_the_weights_are_the_same(config, trainer_of) -> None:
    assert same(*(weights_after_four_steps(trainer_of(config)) for _ in range(2)))


HARMLESS = [
    ("data", "prefetch", 0),
    ("train", "microbatch_size", 2),
    ("train", "recompute", "selective"),
    ("train", "recompute", "block"),
    ("train", "threads", 2),
    ("train", "async_save", False),
    ("train", "deterministic", True),
    ("train", "ema", 0.9),
    ("train", "eval_ema", True),
    ("train", "eval_first", True),
    ("train", "eval_every", 1),
    ("train", "eval_sequences", 3),
    ("train", "save_every", 1),
    ("train", "save_first", 1),
    ("train", "keep", 1),
    ("train", "log_every", 3),
    ("train", "sample_bytes", 0),
    ("log", "experts", False),
    ("log", "window", 4),
    ("log", "gerrymander", 0.5),
    ("log", "nvtx", True),
]
OF_PLACE = {"run_dir", "nproc", "train.device", "data.allow_changed"}
# test_sinks.py, test_profiling.py and test_forced.py
OF_OUTPUT = {
    "log.record_experts", "log.tensorboard", "log.wandb", "log.wandb_project", "log.wandb_mode",
    "log.profile", "log.memory_snapshot",
}  # fmt: skip
# test_overlap.py, test_overflow.py and integration_tests/test_layouts.py
OF_RANKS = {
    "mesh.ep", "mesh.pp", "mesh.nvlink_domain", "mesh.overlap", "mesh.dispatcher", "mesh.overflow",
    "mesh.capacity_factor",
}  # fmt: skip


@pytest.mark.parametrize(("section", "name", "value"), HARMLESS)
def test_what_is_called_harmless_changes_weights_by_rounding_alone(
    config, trainer_of, section, name, value
) -> None:
    changed = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    one, other = (weights_after_four_steps(trainer_of(c)) for c in (config, changed))
    for key, weights in one.items():
        torch.testing.assert_close(other[key], weights, rtol=1e-9, atol=1e-9)


def test_every_setting_that_is_called_harmless_is_held_to_it() -> None:
    tried = {f"{where}.{name}" for where, name, _ in HARMLESS}
    assert tried | OF_PLACE | OF_OUTPUT | OF_RANKS == harmless()


@pytest.mark.parametrize(
    ("section", "of"), [("routing", RoutingConfig), ("optimizer", OptimizerConfig)]
)
def test_no_setting_of_routing_and_optimizer_is_left_out(section, of) -> None:
    tried = {name for where, name, _ in EFFECTS if where == section}
    # What a recording does is in test_forced.py; it takes one that fits.
    assert {f.name for f in fields(of)} - {"replay"} == tried


def test_matrices_decay_but_for_routers(tiny_config, trainer_of) -> None:
    specs = param_specs(trainer_of(tiny_config).model)
    kept = {s.name.rpartition(".")[2] for s in specs if not s.weight_decay}
    assert kept == {"norm", "attention_norm", "moe_norm", "q_norm", "k_norm", "router"}
    assert {s.parameter.ndim for s in specs if s.weight_decay} == {2, 3}


def test_muon_takes_the_matrices_inside_of_blocks_alone(tiny_config, trainer_of) -> None:
    specs = param_specs(trainer_of(tiny_config).model, OptimizerConfig(rule="muon"))
    outside = {s.name.rpartition(".")[2] for s in specs if s.rule == "adamw"}
    assert outside == {
        "embedding", "head", "router", "norm", "attention_norm", "moe_norm", "q_norm", "k_norm",
    }  # fmt: skip
    assert {"gate_up", "down"} <= {s.name.rpartition(".")[2] for s in specs if s.rule == "muon"}


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 1), ("block", 2)])
def test_recomputation_of_blocks_runs_each_twice(tiny_config, trainer_of, recompute, times) -> None:
    config = replace(tiny_config, train=replace(tiny_config.train, recompute=recompute))
    trainer = trainer_of(config)
    calls = []
    for module in trainer.model.modules():
        if isinstance(module, Block):
            module.register_forward_pre_hook(lambda *_: calls.append(1))
    trainer.step()
    assert len(calls) == config.model.num_layers * times
