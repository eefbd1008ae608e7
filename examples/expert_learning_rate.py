"""Train the same small model with several learning rates for its experts.

An expert sees K / E of the tokens, so its gradient is the mean of fewer, and noisier, than that of
attention. AdamW divides by the size of the gradient, so the step is as large all the same: whether
experts want a smaller or a larger step is a question to ask, not to answer from theory.
Run it with several seeds before believing a difference, and with more steps than here.

    python examples/expert_learning_rate.py [--steps 200] [--multipliers 0.5 1 2] [--seeds 2]
"""

import argparse
import json
import tempfile
from pathlib import Path

from moe_train.cli import command


def loss_of(folder: Path, multiplier: float, seed: int, steps: int, more: list[str]) -> float:
    words = [
        "run", "--run-dir", str(folder), "--train.steps", str(steps), "--train.seed", str(seed),
        "--optimizer.expert-lr", str(multiplier), "--train.sample-bytes", "0",
        "--train.save-every", "0", "--train.eval-every", "0", *more,
    ]  # fmt: skip
    if code := command(words):
        raise SystemExit(code)
    return json.loads((folder / "result.json").read_text())["validation_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--multipliers", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="small, to see that it works")
    given = parser.parse_args()
    steps, seeds, more = given.steps, given.seeds, []
    if given.smoke:
        steps, seeds = 2, 1
        more = ["--model.dim", "32", "--model.num-layers", "1", "--train.eval-sequences", "4"]
    rows = {}
    for multiplier in given.multipliers:
        with tempfile.TemporaryDirectory() as root:
            rows[multiplier] = [
                loss_of(Path(root) / str(seed), multiplier, seed, steps, more)
                for seed in range(seeds)
            ]
    print(f"validation loss after {steps} steps, nats a byte; one column a seed")
    for multiplier, losses in rows.items():
        print(f"expert rate x {multiplier:<5g} " + "  ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
