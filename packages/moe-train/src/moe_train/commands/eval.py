"""``moe-train eval``: the loss of a trained model on held-out text, its own or another."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_parallel import Mesh, plan_mesh

from moe_train.commands.options import read_options, say, say_json
from moe_train.commands.start import start
from moe_train.config import RunConfig
from moe_train.data.training import open_data
from moe_train.errors import RunError
from moe_train.evaluation import evaluate
from moe_train.labels import labels
from moe_train.load_config import Layer
from moe_train.ranks import RankInfo, join, pick_device
from moe_train.trained import TrainedModel, find_checkpoint

ALLOWED = ("data.", "mesh.", "train.eval_sequences", "train.device", "train.threads", "nproc")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions(RunConfig):
    """What to measure.

    Attributes:
        run: A run's folder, or one of its checkpoints.
        step: Of the checkpoint; the newest without it.
        weights: The weights, or their averages where the run keeps them.
        json: Print JSON.
    """

    run: Path
    step: int | None = None
    weights: Literal["master", "ema"] = "master"
    json: bool = False


FLAGS = {"": EvalOptions}
EXAMPLES = (
    "moe-train eval runs/main",
    "moe-train eval runs/main --step 350 --json",
    "moe-train eval runs/main --data.path texts --data.suffix .txt --train.eval-sequences 1024",
    "moe-train eval runs/main --nproc 2 --mesh.ep 2",
)


def main(argv: list[str]) -> int:
    """Measure and print."""
    return start("eval", argv, options_of(argv), _work)


def options_of(argv: list[str]) -> EvalOptions:
    """Return what to measure: the run's settings below the given ones.

    Raises:
        RunError: If a setting is given that would make another model of it.
    """
    about = (
        "Measure the loss of a trained model on held-out text. Settings are those of the run; "
        "data, mesh, train.eval-sequences, train.device and train.threads may be given anew."
    )
    wanted = {"prog": "moe-train eval", "about": about, "examples": EXAMPLES, "places": ("run",)}
    first = read_options(EvalOptions, argv, **wanted).config
    found = find_checkpoint(first.run, first.step)
    base = [Layer(str(found.reader.path), found.tree)]
    options, sources = read_options(EvalOptions, argv, **wanted, base=base)
    own = {f.name for f in dataclasses.fields(EvalOptions) if f.name not in found.tree}
    for key, source in sources.items():
        of_run = source in ("default", str(found.reader.path))
        if not of_run and not key.startswith(ALLOWED) and key not in own:
            raise RunError(
                f"{key} is of the run and cannot be set by {source}; what can: {', '.join(ALLOWED)}"
            )
    return options


def _work(options: EvalOptions, info: RankInfo) -> None:
    found, device = find_checkpoint(options.run, options.step), pick_device(options, info)
    plan = plan_mesh(info.world_size, ep=options.mesh.ep, num_experts=options.model.num_experts)
    text = open_data(options.data, options.model.vocab_size, found.run)
    join(info, device)
    mesh = Mesh.create(plan)
    model = TrainedModel(found, options, mesh, device, kind=options.weights)
    number = options.train.eval_sequences
    results = {name: evaluate(model, one, number) for name, one in text.held_out.items()}
    losses = {name: result.loss for name, result in results.items()}
    loss, tokens = text.mean(losses), sum(result.tokens for result in results.values())
    if info.rank:
        return
    facts: dict[str, object] = {
        "checkpoint": str(found.reader.path),
        "step": found.step,
        "weights": options.weights,
        "data": text.origin,
        "loss": loss,
        "bits": loss / math.log(2),
        "nats_per_byte": loss / text.bytes_per_token,
        "losses": losses,
        "tokens": tokens,
    }
    marks = labels(options.routing)
    if marks:
        facts["labels"] = marks
    if options.json:
        say_json(facts)
    else:
        say(
            f"step {found.step}: {text.describe(loss)} ({loss / math.log(2):.4f} bits a token) "
            f"over {tokens:,} tokens of {facts['data']}" + "".join(f"; {m}" for m in marks)
        )
        for name, one in losses.items() if len(losses) > 1 else ():
            say(f"  {name}: {text.describe(one)}")
