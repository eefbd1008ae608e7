"""``moe-train run``: train, or go on training."""

from moe_train.commands.options import read_options
from moe_train.commands.start import start
from moe_train.config import RunConfig
from moe_train.prepare import prepare
from moe_train.run import run

FLAGS = {"": RunConfig}

EXAMPLES = (
    "moe-train run                                  # the default model, to runs/main",
    "moe-train run                                  # again: goes on from where it was",
    "moe-train run --run-dir runs/a --data.path texts --data.suffix .txt",
    "moe-train run --config a.toml --optimizer.lr 0.002",
    "moe-train run --nproc 4 --mesh.ep 2            # four ranks on this machine",
    "torchrun --nproc-per-node 8 -m moe_train run --config a.toml",
)


def main(argv: list[str]) -> int:
    """Train on as many ranks as asked for."""
    config = read_options(
        RunConfig, argv, prog="moe-train run", examples=EXAMPLES,
        about="Train a Mixture-of-Experts language model, or go on from where a run is.",
    ).config  # fmt: skip
    return start("run", argv, config, run, prepare)
