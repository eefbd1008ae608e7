"""Watch a balance loss fall while the load that it is meant for gets worse.

Trains a small MoE transformer on the standard library of Python, with the usual balance loss and
with the distance loss, at several weights and seeds, and records at every step what the usual loss
says of the whole batch and how far the load is from even. Needs no GPU.

python benchmarks/bench_gerrymander.py --out benchmarks/results/gerrymander.json
"""

import argparse
import statistics
from pathlib import Path

import torch
from common import machine, write
from moe_kernels import unevenness
from moe_parallel import Mesh, plan_mesh
from moe_train.alarms import gerrymander_index
from moe_train.config import DataConfig, ModelConfig, RoutingConfig, RunConfig, TrainConfig
from moe_train.corpus import Corpus, load_corpus
from moe_train.data import Sequences
from moe_train.trainer import Trainer

BLOCK = 10  # steps of one mean in the results
WINDOW = 40  # steps that the index looks back on
LENGTH = 64
SETTINGS = [
    ("product", 0.0),
    ("product", 0.01),
    ("product", 0.1),
    ("product", 1.0),
    ("distance", 0.01),
    ("distance", 0.1),
    ("distance", 1.0),
]


def make_trainer(form: str, weight: float, seed: int, corpus: Corpus) -> Trainer:
    """Make a transformer of two layers with 8 experts, two a token."""
    config = RunConfig(
        model=ModelConfig(
            dim=64, num_layers=2, num_heads=2, num_kv_heads=1, expert_dim=32, shared_dim=32
        ),
        routing=RoutingConfig(balance=weight, balance_form=form),
        data=DataConfig(sequence_length=LENGTH, seed=seed),
        train=TrainConfig(batch_size=8, device="cpu", seed=seed),
    )
    device = torch.device("cpu")
    parts = (Sequences(corpus.train, LENGTH), Sequences(corpus.held_out, LENGTH))
    return Trainer(config, Mesh.create(plan_mesh(1)), device, *parts)


def measure(form: str, weight: float, seed: int, steps: int, corpus: Corpus) -> list[dict]:
    """Train, and return a row for each layer."""
    trainer = make_trainer(form, weight, seed, corpus)
    scores, distances, largest = [], [], []
    for _ in range(steps):
        result = trainer.step()
        uneven = unevenness(result.count_LE, result.share_LE)
        scores.append(uneven.score.tolist())
        distances.append(uneven.distance.tolist())
        largest.append((result.load_LE.amax(1) * result.load_LE.shape[1]).tolist())
    validation, _ = trainer.evaluate()
    rows = []
    for layer in range(2):
        score, distance, most = ([x[layer] for x in y] for y in (scores, distances, largest))
        index = [
            gerrymander_index(score[t - WINDOW : t], distance[t - WINDOW : t])
            for t in range(WINDOW, steps + 1)
        ] or [0.0]
        last = max(1, steps // 5)
        rows.append(
            {
                "form": form,
                "weight": weight,
                "seed": seed,
                "layer": layer,
                "score": means(score),
                "distance": means(distance),
                "largest_to_mean": means(most),
                "index": round(max(index), 4),
                "index_at_step": WINDOW + index.index(max(index)),
                "steps_below_even": sum(s < 0 for s in score),
                "last_score": round(statistics.mean(score[-last:]), 4),
                "last_distance": round(statistics.mean(distance[-last:]), 4),
                "last_largest_to_mean": round(statistics.mean(most[-last:]), 3),
                "validation_loss": round(validation, 4),
            }
        )
    return rows


def means(values: list[float]) -> list[float]:
    """Return the means of blocks of steps."""
    starts = range(0, len(values), BLOCK)
    return [round(statistics.mean(values[i : i + BLOCK]), 4) for i in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it works")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps, seeds = (3, 1) if arguments.smoke else (arguments.steps, arguments.seeds)
    corpus = load_corpus(None, ".py")
    rows = []
    for form, weight in SETTINGS:
        of_setting = [
            row for seed in range(seeds) for row in measure(form, weight, seed, steps, corpus)
        ]
        rows += of_setting
        print(
            f"{form:8} {weight:<5}"
            + "".join(
                f"  {name} {statistics.mean(row[name] for row in of_setting):.3f}"
                for name in ("index", "last_score", "last_distance", "last_largest_to_mean",
                             "validation_loss")
            ),
            flush=True,
        )  # fmt: skip
    write(rows, machine() | {"corpus": corpus.digest[:12]}, arguments.out)


if __name__ == "__main__":
    main()
