"""``moe-train generate``: text from a trained model."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moe_parallel import Mesh, plan_mesh

from moe_train.commands.options import read_options, say, say_json
from moe_train.config.rules import require, require_no_less_than_zero
from moe_train.data.training import tokenizer_of
from moe_train.errors import RunError
from moe_train.labels import labels
from moe_train.ranks import RankInfo, pick_device
from moe_train.sample import PROMPT, generate
from moe_train.trained import TrainedModel, find_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """What to write.

    Attributes:
        run: A run's folder, or one of its checkpoints.
        step: Of the checkpoint; the newest without it.
        weights: The weights, or their averages where the run keeps them.
        prompt: Text to continue; ``-`` reads it from the standard input.
        bytes: How many to add; of a run with a tokenizer, how many tokens.
        temperature: Divides the logits; lower is more cautious, 0 takes the likeliest byte.
        top_k: Draw among so many likeliest only; 0 for all.
        top_p: Draw among the fewest that have this probability together; 1 for all.
        seed: Of the draws: the same seed gives the same text.
        device: ``auto`` takes a GPU if there is one.
        threads: On the CPU; 0 for all cores.
        json: Print JSON.
    """

    run: Path
    step: int | None = None
    weights: Literal["master", "ema"] = "master"
    prompt: str = PROMPT.decode()
    bytes: int = 300
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0
    json: bool = False

    def __post_init__(self) -> None:
        require_no_less_than_zero(
            bytes=self.bytes, temperature=self.temperature, top_k=self.top_k, seed=self.seed,
            threads=self.threads,
        )  # fmt: skip
        require(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p}")
        require(self.prompt != "", "prompt must have at least one byte, got none")


FLAGS = {"": GenerateOptions}
EXAMPLES = (
    "moe-train generate runs/main",
    "moe-train generate runs/main --prompt 'class ' --bytes 500 --temperature 0.4",
    "moe-train generate runs/main --temperature 1 --top-p 0.9 --seed 3",
    "cat start.py | moe-train generate runs/main --prompt - --temperature 0",
)


def main(argv: list[str]) -> int:
    """Write on one rank, and print."""
    options = read_options(
        GenerateOptions, argv, prog="moe-train generate", places=("run",), examples=EXAMPLES,
        about="Continue a text with a trained model. The same seed gives the same text.",
    ).config  # fmt: skip
    found = find_checkpoint(options.run, options.step)
    config = found.config()
    train = replace(config.train, device=options.device, threads=options.threads)
    config = replace(config, train=train)
    device = pick_device(config, RankInfo(0, 0, 1))
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt:
        raise RunError("the standard input is empty, and a prompt must have at least one byte")
    model = TrainedModel(found, config, Mesh.create(plan_mesh(1)), device, kind=options.weights)
    text = generate(
        model, options.bytes, tokenizer_of(config.data), prompt=prompt.encode(),
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
        seed=options.seed,
    )  # fmt: skip
    marks = labels(config.routing)
    if options.json:
        about = {"checkpoint": str(found.reader.path), "step": found.step, "seed": options.seed}
        about |= {"labels": marks} if marks else {}
        say_json({**about, "prompt": prompt, "text": text})
    else:
        sys.stderr.writelines(f"{mark}\n" for mark in marks)
        say(text)
    return 0
