"""A trained model, as a run's checkpoint holds it: weights alone, without optimizer and data.

It needs the memory of the weights in the run's number format, a fifth or less of what training
needs. On several ranks each reads the experts that it holds and no others.
"""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from moe_ckpt import CheckpointReader, MissingTensorError, find_latest, open_checkpoint
from moe_dispatch import make_dispatcher
from moe_parallel import Mesh
from torch import Tensor

from moe_train.config import RunConfig
from moe_train.errors import RunError
from moe_train.load_config import from_dict
from moe_train.model import Transformer


class ModelHolder(Protocol):
    """What is needed to compute with a model: a trainer has it too."""

    @property
    def config(self) -> RunConfig:
        """The run."""
        ...

    @property
    def mesh(self) -> Mesh:
        """This rank's place."""
        ...

    @property
    def device(self) -> torch.device:
        """Where to compute."""
        ...

    @property
    def model(self) -> Transformer:
        """The model."""
        ...

    @property
    def bias_LE(self) -> Tensor:  # noqa: N802, a shape suffix
        """The routers' selection bias."""
        ...


class Found(NamedTuple):
    """A checkpoint of a run.

    Attributes:
        run: The run's folder.
        reader: Of the checkpoint.
        tree: The settings with which it was saved, as plain values.
    """

    run: Path
    reader: CheckpointReader
    tree: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that the weights have seen."""
        return self.reader.step

    def config(self) -> RunConfig:
        """Return the settings of the run."""
        return from_dict(RunConfig, self.tree, source=str(self.reader.path))


def find_checkpoint(path: Path, step: int | None = None) -> Found:
    """Return the newest checkpoint of a run, the one of a step, or the one that ``path`` is.

    Raises:
        RunError: If there is none.
    """
    checkpoints = path / "checkpoints"
    if (path / "manifest.json").is_file():
        place, run = path, path.resolve().parent.parent
        if step is not None:
            raise RunError(f"{path} is one checkpoint: leave step {step} away, or name the run")
    elif not path.is_dir():
        raise RunError(f"{path} is no folder of a run and no checkpoint")
    elif not checkpoints.is_dir():
        raise RunError(f"{path} holds no run: it has no folder named checkpoints")
    elif step is not None:
        place, run = checkpoints / f"step-{step:08d}", path
        if not place.is_dir():
            there = sorted(p.name for p in checkpoints.glob("step-*"))
            raise RunError(f"{path} has no checkpoint of step {step}; it has {there}")
    else:
        newest, run = find_latest(checkpoints), path
        if newest is None:
            raise RunError(f"{checkpoints} holds no valid checkpoint")
        place = newest.path
    reader = open_checkpoint(place)
    settings = reader.state.get("config")
    if not isinstance(settings, dict):
        raise RunError(f"{place} was not saved by a run: it holds weights and no settings")
    return Found(run, reader, {**settings, "run_dir": str(run)})


class TrainedModel:
    """A model with the weights of a checkpoint, on this rank.

    Args:
        found: The checkpoint.
        config: The run's settings, of which those of the model are the checkpoint's.
        mesh: This rank's place.
        device: Where to compute.
        kind: Which weights: ``master``, or ``ema`` for their averages.
    """

    def __init__(
        self,
        found: Found,
        config: RunConfig,
        mesh: Mesh,
        device: torch.device,
        *,
        kind: str = "master",
    ):
        self.config, self.mesh, self.device = config, mesh, device
        dtype = getattr(torch, config.train.dtype)
        model = Transformer(
            config.model,
            config.routing,
            make_dispatcher(config.model.num_experts, mesh.ep_group),
            seed=config.train.seed,
            dtype=dtype,
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _read(found.reader, name, kind, parameter, mesh)
        self.model = model.to(device)
        layers, wide = config.model.moe_layers, torch.promote_types(dtype, torch.float32)
        bias_LE = torch.zeros(len(layers), config.model.num_experts, dtype=wide)
        for layer, bias_E in zip(layers, bias_LE, strict=True):
            name = f"layers.{layer}.moe.router_bias"
            if name in found.reader.names:
                _read(found.reader, name, "buffer", bias_E, mesh)
        self.bias_LE = bias_LE.to(device)


def _read(reader: CheckpointReader, name: str, kind: str, into: Tensor, mesh: Mesh) -> None:
    """Copy a tensor of a checkpoint, or the part of this rank if it is of experts."""
    try:
        info = reader.info(name, kind)
    except MissingTensorError as error:
        if kind == "ema":
            raise RunError(f"{reader.path} has no averages of weights: {error}") from error
        raise
    rows, shape = into.shape[0], info.shape
    if shape[1:] != into.shape[1:] or shape[0] not in (rows, rows * mesh.plan.ep):
        raise RunError(
            f"{name} has shape {shape} in {reader.path}, and this rank holds {tuple(into.shape)} "
            f"of a model divided by ep {mesh.plan.ep}"
        )
    first = 0 if shape[0] == rows else rows * mesh.ep_rank
    width = into[0].numel()
    values = np.empty(into.numel(), info.dtype)
    reader.read_into(info, [(first * width, (first + rows) * width, values)])
    into.copy_(torch.from_numpy(values).view(into.shape))
