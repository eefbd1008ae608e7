"""Where records go besides ``metrics.jsonl``: TensorBoard, Weights & Biases.

A run is one run there too, however often it was started: its id stays in its folder, and steps
that are done again after a crash do not show twice.
"""

import importlib
import importlib.util
import math
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from moe_train.config import LogConfig, RunConfig
from moe_train.errors import RunError
from moe_train.load_config import to_dict


class Sink(Protocol):
    """Takes the numbers of records."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a step by name."""
        ...

    def close(self) -> None:
        """Send or write what was held back."""
        ...


def check_sinks(config: LogConfig) -> None:
    """Raise if a sink is asked for whose package is not installed.

    Raises:
        RunError: Naming the extra that brings it.
    """
    for name, asked in (("tensorboard", config.tensorboard), ("wandb", config.wandb)):
        if asked and importlib.util.find_spec(name) is None:
            raise RunError(
                f"log.{name} needs the package {name}, which is not installed; install "
                f"moe-train[{name}], or set log.{name} to False"
            )


def open_sinks(config: RunConfig, root: Path, first_step: int) -> list[Sink]:
    """Open what the run asks for. On one rank only.

    Args:
        config: The run.
        root: Its folder.
        first_step: Step that the run starts or goes on from; what was written of later ones is
            done again.
    """
    sinks: list[Sink] = []
    if config.log.tensorboard:
        sinks.append(TensorBoard(root / "tensorboard", first_step))
    if config.log.wandb:
        sinks.append(WeightsAndBiases(config, root, first_step))
    return sinks


def run_id(root: Path) -> str:
    """Return the id of the run in a folder; the first start makes it."""
    path = root / "run_id"
    if not path.exists():
        partial = root / ".run_id.partial"
        partial.write_text(uuid.uuid4().hex[:16] + "\n", encoding="utf-8")
        partial.replace(path)
    return path.read_text(encoding="utf-8").strip()


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by names that grow with its layers and not with its experts.

    Examples:
        >>> record = {"kind": "train", "step": 3, "loss": 2.0, "distance": [0.1, 0.2], "alarms": []}
        >>> for name, value in numbers(record).items():
        ...     print(name, value)
        train/loss 2.0
        router/distance/layer_0 0.1
        router/distance/layer_1 0.2
        router/alarms 0
    """
    return dict(_numbers(record))


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if key == "alarms":
            yield "router/alarms", len(value)
        elif key == "step":
            continue
        elif isinstance(value, int | float):
            yield f"{record['kind']}/{key}", value
        elif isinstance(value, dict):
            yield from ((f"{key}/{part}", x) for part, x in value.items())
        elif isinstance(value, list) and all(isinstance(x, int | float) for x in value):
            yield from ((f"router/{key}/layer_{i}", x) for i, x in enumerate(value))


class TensorBoard:
    """Event files. A start after a crash takes back what was written of the steps it does again."""

    def __init__(self, folder: Path, first_step: int):
        # An optional dependency, in the one file that is about it; it is slow to import.
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases that later starts continue.

    It takes no step that it has had: what is done again after a crash it drops by itself.

    Raises:
        RunError: If it does not start.
    """

    def __init__(self, config: RunConfig, root: Path, first_step: int):
        wandb = importlib.import_module("wandb")
        try:
            self._run = wandb.init(
                project=config.log.wandb_project,
                id=run_id(root),
                name=root.resolve().name,
                dir=str(root),
                mode=config.log.wandb_mode,
                resume="allow",
                config={**to_dict(config), "first_step": first_step},
            )
        except Exception as error:  # of many kinds: no key, no network, no such project
            raise RunError(
                f"Weights & Biases does not start ({error}); log in, or set log.wandb_mode to "
                "offline, or log.wandb to False"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._run.log(finite, step=step)

    def close(self) -> None:
        self._run.finish()
