"""Time what a run does beside its steps: saving in either way, averages, deterministic mode.

python benchmarks/bench_loop.py --out benchmarks/results/loop.json
python benchmarks/bench_loop.py --dim 1024 --layers 8     # a GPU wants more to do

The peer is the same steps with none of it, in the same process, turn by turn.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from common import DEVICE, machine
from moe_parallel import Mesh, plan_mesh
from moe_train.checkpoints import Checkpoints
from moe_train.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from moe_train.corpus import load_corpus
from moe_train.data import Sequences
from moe_train.determinism import determinism
from moe_train.folder import RunFolder
from moe_train.trainer import Trainer

SAVES = 2
"""Checkpoints in one turn."""


def make_config(arguments: argparse.Namespace, folder: Path) -> RunConfig:
    dim, heads = arguments.dim, max(2, arguments.dim // 64)
    return RunConfig(
        run_dir=folder,
        model=ModelConfig(
            dim=dim, num_layers=arguments.layers, num_heads=heads, num_kv_heads=heads // 2,
            num_experts=arguments.experts, expert_dim=dim, shared_dim=dim,
        ),
        data=DataConfig(sequence_length=arguments.length),
        train=TrainConfig(
            batch_size=arguments.batch, device=DEVICE,
            dtype="bfloat16" if DEVICE == "cuda" else "float32",
        ),
    )  # fmt: skip


def turns(arguments: argparse.Namespace, folder: Path) -> dict[str, Callable[[], float]]:
    """Return what takes one turn of each kind, and the seconds of a step in it."""
    corpus = load_corpus(None, ".py")
    text = Sequences(np.asarray(corpus.train), arguments.length)
    config = make_config(arguments, folder)
    device, every = torch.device(DEVICE), max(1, arguments.steps // SAVES)

    def turn(name: str, deterministic: bool = False, saves: bool = False, **train: object):
        own = replace(config, train=replace(config.train, **train))
        trainer = Trainer(own, Mesh.create(plan_mesh(1)), device, text, text)
        kept = RunFolder(folder / name.replace(" ", "-"))
        checkpoints = Checkpoints(kept, trainer, corpus)

        def take() -> float:
            with determinism(deterministic):
                begin = time.perf_counter()
                for step in range(arguments.steps):
                    trainer.step()
                    if saves and (step + 1) % every == 0:
                        checkpoints.save(target=0, seconds=0.0, tokens=0)
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
                seconds = (time.perf_counter() - begin) / arguments.steps
            checkpoints.settle()
            return seconds

        return take

    return {
        "nothing": turn("nothing"),
        "save in the foreground": turn("foreground", saves=True, async_save=False),
        "save in the background": turn("background", saves=True, async_save=True),
        "averages": turn("averages", ema=0.999),
        "deterministic": turn("deterministic", deterministic=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two steps, to see that it works")
    parser.add_argument("--out", type=Path, help="write the results here")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="in one turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind; the best counts")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.steps = arguments.rounds = 2
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        takes = turns(arguments, Path(scratch))
        for take in takes.values():
            take()  # kernels are compiled, memory is found
        for _ in range(arguments.rounds):
            for name, take in takes.items():
                best[name] = min(best.get(name, float("inf")), take())
    result = {
        "machine": machine(),
        "milliseconds_a_step": {name: round(1e3 * s, 3) for name, s in best.items()},
        "over_nothing": {name: round(s / best["nothing"], 4) for name, s in best.items()},
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("out", "smoke")},
    }
    print(json.dumps(result, indent=2))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
