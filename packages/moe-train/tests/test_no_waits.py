"""A step never makes the host wait for the device, and deterministic mode costs little."""

import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from moe_parallel import Mesh, plan_mesh
from moe_train.config import RoutingConfig
from moe_train.counts import Counts
from moe_train.data import IGNORED, Batch, Sequences
from moe_train.determinism import determinism
from moe_train.trainer import Trainer
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "masked_select", "unique")
# Their operators have other ways on a CPU, where nothing has to be waited for.
OWN_WAYS = ("moe_kernels", "moe_dispatch")


class NoWaits(TorchDispatchMode):
    """Refuses operators whose result the host reads, wherever they are called by the trainer."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in WAITS and _caller().split(".")[0] not in OWN_WAYS:
            raise AssertionError(f"{func} in {_caller()} waits for the device")
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("moe_", "test_")) and not name.endswith("test_no_waits"):
            return name
        frame = frame.f_back
    return "?"


class Padded(Sequences):
    """Sequences with padding of which only the device knows the amount."""

    def batch(self, numbers, device=None) -> Batch:
        batch = super().batch(numbers, device)
        targets = batch.targets_BS.clone()
        targets[:, 9:] = IGNORED
        return Batch(batch.inputs_BS, targets, padded=True)


def everything(config):
    """Turn on all that a step can do."""
    train = replace(config.train, ema=0.9, skip_spikes=6.0, spike_window=3, microbatch_size=2)
    routing = RoutingConfig(balance=0.1, z=0.01, bias=True, bias_rate=0.01)
    return replace(config, train=train, routing=routing)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "block"])
def test_no_operator_of_a_step_makes_the_host_wait(
    tiny_config, trainer_of, padded, recompute
) -> None:
    config = everything(tiny_config)
    trainer = trainer_of(replace(config, train=replace(config.train, recompute=recompute)))
    if padded:
        trainer.train_sequences = Padded(trainer.train_sequences.tokens, 16)
    counts = Counts(*torch.zeros(5, dtype=torch.int64))
    with NoWaits():
        for _ in range(4):
            counts = counts.after(trainer.step())
    assert int(counts.in_a_row) == 0
    with pytest.raises(AssertionError, match="waits for the device"), NoWaits():
        trainer.counters()


def test_deterministic_mode_refuses_what_may_differ_and_is_left_as_it_was(monkeypatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for outside in (False, True):
        torch.use_deterministic_algorithms(outside, warn_only=outside)
        try:
            with determinism(True):
                assert torch.are_deterministic_algorithms_enabled()
                assert not torch.is_deterministic_algorithms_warn_only_enabled()
                with pytest.raises(RuntimeError, match="does not have a deterministic"):
                    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
            with determinism(False):
                assert torch.are_deterministic_algorithms_enabled() == outside
            assert torch.are_deterministic_algorithms_enabled() == outside
            assert torch.is_deterministic_algorithms_warn_only_enabled() == outside
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_step_has_deterministic_operators_alone(tiny_config, trainer_of) -> None:
    plain = trainer_of(everything(tiny_config))
    strict = trainer_of(everything(tiny_config))
    for _ in range(3):
        plain.step()
        with determinism(True):
            strict.step()
    for a, b in zip(plain.shards(), strict.shards(), strict=True):
        assert torch.equal(a.data, b.data)


def trainer_on_gpu(config) -> Trainer:
    text = Sequences(np.frombuffer(b"def f(x): return x\n" * 4000, np.uint8), 512)
    shape = {"dim": 512, "num_heads": 8, "num_kv_heads": 4, "num_experts": 16, "expert_dim": 512}
    train = replace(config.train, device="cuda", dtype="bfloat16", microbatch_size=4)
    config = replace(
        config, model=replace(config.model, **shape), train=train,
        data=replace(config.data, sequence_length=512),
    )  # fmt: skip
    return Trainer(config, Mesh.create(plan_mesh(1)), torch.device("cuda"), text, text)


@pytest.mark.gpu
def test_on_a_gpu_a_whole_step_passes_the_check_for_waits(tiny_config) -> None:
    trainer = trainer_on_gpu(everything(tiny_config))
    counts = Counts(*torch.zeros(5, dtype=torch.int64, device="cuda"))
    for _ in range(2):  # kernels are compiled and tuned
        trainer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            counts = counts.after(trainer.step())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(counts.in_a_row) == 0


def seconds_of(trainer: Trainer, steps: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


@pytest.mark.gpu
def test_on_a_gpu_deterministic_mode_costs_at_most_5_percent_and_repeats_every_bit(
    tiny_config,
) -> None:
    with determinism(True):
        strict, again = (trainer_on_gpu(everything(tiny_config)) for _ in range(2))
        seconds_of(strict, 5)
        seconds_of(again, 5)
        for a, b in zip(strict.shards(), again.shards(), strict=True):
            assert torch.equal(a.data, b.data), (a.name, a.kind)
    plain = trainer_on_gpu(everything(tiny_config))
    seconds_of(plain, 5)
    times = {True: [], False: []}
    for _ in range(5):
        for wanted, trainer in ((True, strict), (False, plain)):
            with determinism(wanted):
                times[wanted].append(seconds_of(trainer, 10))
    assert min(times[True]) <= 1.05 * min(times[False]), times
