"""The same mathematics in every layout: one run, cut in many ways over ranks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from moe_ckpt import open_checkpoint, save
from moe_ckpt.torch_adapter import TorchCommunicator
from moe_parallel import Mesh, plan_mesh
from moe_train.config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RoutingConfig,
    RunConfig,
    TrainConfig,
)
from moe_train.corpus import load_corpus
from moe_train.data import IGNORED, Batch, Sequences
from moe_train.trainer import Trainer
from rank_pool import RankPool

LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # ranks, ep
TINY = ModelConfig(
    dim=16, num_layers=2, num_heads=2, num_kv_heads=1, num_experts=8, expert_dim=8, shared_dim=8
)
EXACT = RunConfig(
    model=TINY,
    routing=RoutingConfig(balance=0.02, z=0.001, bias=True),
    data=DataConfig(sequence_length=32),
    train=TrainConfig(batch_size=4, dtype="float64", eval_sequences=6, device="cpu", threads=1),
)
DEFAULT = RunConfig(train=TrainConfig(device="cpu", threads=1, eval_sequences=8))


def make_trainer(group: dist.ProcessGroup, config: RunConfig) -> Trainer:
    size, length = dist.get_world_size(group), config.data.sequence_length
    corpus = load_corpus(config.data.path, config.data.suffix)
    plan = plan_mesh(size, ep=config.mesh.ep, num_experts=config.model.num_experts)
    mesh = Mesh.create(plan, group=group)
    train, held_out = Sequences(corpus.train, length), Sequences(corpus.held_out, length)
    return Trainer(config, mesh, torch.device("cpu"), train, held_out)


class Padded(Sequences):
    """Sequences of which those of odd number have one real token and the others all."""

    def batch(self, numbers, device=None) -> Batch:
        batch = super().batch(numbers, device)
        targets = batch.targets_BS.clone()
        targets[torch.from_numpy(numbers % 2 == 1), 1:] = IGNORED
        return Batch(batch.inputs_BS, targets, padded=True)


def train_padded(group: dist.ProcessGroup, config: RunConfig, steps: int) -> list[list[float]]:
    trainer = make_trainer(group, config)
    trainer.train_sequences = Padded(trainer.train_sequences.tokens, config.data.sequence_length)
    results = [trainer.step() for _ in range(steps)]
    return [[float(r.loss), float(r.balance_loss), float(r.grad_norm)] for r in results]


def train(group: dist.ProcessGroup, config: RunConfig, steps: int) -> dict:
    trainer = make_trainer(group, config)
    results = [trainer.step() for _ in range(steps)]
    return {
        "losses": [float(r.loss) for r in results],
        "balance": [float(r.balance_loss) for r in results],
        "norms": [float(r.grad_norm) for r in results],
        "loads": torch.stack([r.load_LE for r in results]),
        "bias": trainer.bias_LE,
        "validation": trainer.evaluate()[0],
    }


def first_gradients(group: dist.ProcessGroup, config: RunConfig, root: str) -> None:
    """Save the state after two steps; the first moment holds the gradients."""
    trainer = make_trainer(group, config)
    for _ in range(2):
        trainer.step()
    comm = TorchCommunicator(group)
    save(root, trainer.shards(), step=2, state={"ranks": comm.size}, comm=comm)


@pytest.fixture(scope="session")
def one_rank(pool: RankPool) -> dict:
    [result] = pool.run(train, 1, EXACT, 150)
    return result


@pytest.mark.parametrize(("ranks", "ep"), LAYOUTS[1:])
def test_every_layout_makes_the_same_run_in_float64(pool, one_rank, ranks, ep) -> None:
    config = replace(EXACT, mesh=MeshConfig(ep=ep))
    results = pool.run(train, ranks, config, 150)
    for result in results:
        assert result["losses"] == pytest.approx(one_rank["losses"], rel=1e-9, abs=1e-9)
        assert result["balance"] == pytest.approx(one_rank["balance"], rel=1e-9)
        assert result["validation"] == pytest.approx(one_rank["validation"], rel=1e-9)
        assert torch.equal(result["loads"], one_rank["loads"])
        assert torch.equal(result["bias"], one_rank["bias"])
    assert len({tuple(result["norms"]) for result in results}) == 1
    assert results[0]["norms"] == pytest.approx(one_rank["norms"], rel=1e-9)
    assert one_rank["losses"][-1] < 0.7 * one_rank["losses"][0]


KINDS = {
    "latent experts without a gate": {
        "latent_dim": 8, "activation": "relu2", "shared_gate": True, "num_dense_layers": 1,
        "dense_dim": 12,
    },
    "latent attention, tied": {
        "attention": "latent", "kv_rank": 6, "rope_head_dim": 4, "tie_embeddings": True,
        "activation": "clamped_swiglu", "window": 7,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_makes_the_same_run_on_several_ranks(pool, kind) -> None:
    config = replace(EXACT, model=replace(TINY, **KINDS[kind]))
    [want] = pool.run(train, 1, config, 4)
    for got in pool.run(train, 4, replace(config, mesh=MeshConfig(ep=2)), 4):
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-9)
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-9)
        assert got["validation"] == pytest.approx(want["validation"], rel=1e-9)


@pytest.mark.parametrize(("ranks", "ep"), [(4, 2)])
def test_the_default_run_is_the_same_on_several_ranks_in_float32(pool, ranks, ep) -> None:
    [want] = pool.run(train, 1, DEFAULT, 50)
    for got in pool.run(train, ranks, replace(DEFAULT, mesh=MeshConfig(ep=ep)), 50):
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert got["validation"] == pytest.approx(want["validation"], abs=0.02)


def test_gradients_of_every_parameter_agree_between_layouts(pool, tmp_path: Path) -> None:
    without_clipping = replace(EXACT, optimizer=OptimizerConfig(max_norm=0))
    readers = []
    for ranks, ep in LAYOUTS:
        config = replace(without_clipping, mesh=MeshConfig(ep=ep))
        root = tmp_path / f"{ranks}-{ep}"
        pool.run(first_gradients, ranks, config, str(root))
        readers.append(open_checkpoint(root / "step-00000002"))
    for reader in readers[1:]:
        assert reader.names == readers[0].names
        for name in reader.names:
            if name.endswith("router_bias"):
                continue
            got, want = (torch.from_numpy(r.read(name, "exp_avg")) for r in (reader, readers[0]))
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14, msg=name)
            assert want.abs().max() > 0, name


@pytest.mark.parametrize("how", ["selective", "block"])
@pytest.mark.parametrize(("ranks", "ep"), [(1, 1), (4, 2)])
def test_recomputation_changes_no_loss_and_no_count(pool, ranks, ep, how) -> None:
    config = replace(EXACT, mesh=MeshConfig(ep=ep))
    again = replace(config, train=replace(config.train, recompute=how))
    kept = pool.run(train, ranks, config, 5)
    recomputed = pool.run(train, ranks, again, 5)
    for a, b in zip(kept, recomputed, strict=True):
        assert a["losses"] == b["losses"]
        assert torch.equal(a["loads"], b["loads"])


@pytest.mark.parametrize("form", ["product", "distance"])
def test_the_global_balance_loss_is_the_same_in_every_layout(pool, form) -> None:
    routing = replace(EXACT.routing, balance=0.3, balance_over="global", balance_form=form)
    one = replace(EXACT, routing=routing)
    [want] = pool.run(train, 1, one, 12)
    many = replace(one, mesh=MeshConfig(ep=2), train=replace(one.train, microbatch_size=1))
    for got in pool.run(train, 4, many, 12):
        for name in ("losses", "balance", "norms"):
            assert got[name] == pytest.approx(want[name], rel=1e-9, abs=1e-12), name
        assert torch.equal(got["loads"], want["loads"])
    even = 1.0 if form == "product" else 0.0
    assert want["balance"][0] == pytest.approx(even, abs=1e-12)
    assert abs(want["balance"][-1] - even) > 1e-6


@pytest.mark.parametrize("micro", [1, 2])
def test_microbatches_and_ranks_together_change_nothing(pool, one_rank, micro) -> None:
    config = replace(
        EXACT,
        mesh=MeshConfig(ep=2),
        train=replace(EXACT.train, microbatch_size=micro),
    )
    for result in pool.run(train, 2, config, 40):
        assert result["losses"] == pytest.approx(one_rank["losses"][:40], rel=1e-9)


@pytest.mark.parametrize(("ranks", "ep", "micro"), [(2, 1, 0), (2, 2, 1), (4, 2, 1), (1, 1, 1)])
def test_ranks_with_unequal_numbers_of_tokens_weigh_them_alike(pool, ranks, ep, micro) -> None:
    [want] = pool.run(train_padded, 1, EXACT, 10)
    config = replace(
        EXACT, mesh=MeshConfig(ep=ep), train=replace(EXACT.train, microbatch_size=micro)
    )
    for got in pool.run(train_padded, ranks, config, 10):
        for a, b in zip(got, want, strict=True):
            assert a == pytest.approx(b, rel=1e-9)
