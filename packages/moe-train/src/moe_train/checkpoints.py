"""Between a trainer and its checkpoints: what is saved, and how it comes back."""

from typing import Any

import moe_ckpt
import torch
from moe_ckpt import Alone, Loaded
from moe_ckpt.torch_adapter import communicator
from moe_parallel import Shard

from moe_train.config import RunConfig
from moe_train.data.training import TrainingData
from moe_train.folder import RunFolder
from moe_train.load_config import to_dict
from moe_train.trainer import Trainer


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: The run's folder.
        trainer: Whose state is saved.
        data: The text, whose digest is kept with the state.
    """

    def __init__(self, folder: RunFolder, trainer: Trainer, data: TrainingData):
        self.folder, self.trainer, self.data = folder, trainer, data
        group = trainer.mesh.world_group
        self.comm = Alone() if group is None else communicator(group)

    def save(self, *, target: int, seconds: float, tokens: int) -> None:
        """Commit the state of this step. A collective call.

        Args:
            target: Step at which this start of the run ends.
            seconds: Training time so far, over all starts.
            tokens: Tokens trained on so far.
        """
        trainer, config = self.trainer, self.trainer.config
        moe_ckpt.save(
            self.folder.checkpoints,
            [_on_host(shard) for shard in trainer.shards()],
            step=trainer.steps_done,
            state={
                "steps_done": trainer.steps_done,
                "samples_seen": trainer.samples_seen,
                "step_count": trainer.optimizer.step_count,
                "target": target,
                "seconds": seconds,
                "tokens": tokens,
                "corpus": {"digest": self.data.digest, "origin": self.data.origin},
                "config": portable(config),
            },
            comm=self.comm,
            keep=config.train.keep,
            overwrite=True,
        )

    def load(self) -> Loaded:
        """Take over the newest checkpoint whose every byte is as it was written.

        A collective call.

        Returns:
            The checkpoint's step and state, and what was passed over to find it.
        """
        live = self.trainer.shards()
        host = [_on_host(shard) for shard in live]
        loaded = moe_ckpt.load(self.folder.checkpoints, host, comm=self.comm)
        for shard, copy in zip(live, host, strict=True):
            if copy is not shard:
                shard.data.copy_(copy.data)
        state = loaded.state
        self.trainer.loaded(
            steps_done=state["steps_done"],
            samples_seen=state["samples_seen"],
            step_count=state["step_count"],
        )
        return loaded


def portable(config: RunConfig) -> dict[str, Any]:
    """Return the settings without those that only say where the run is."""
    settings = to_dict(config)
    return {key: value for key, value in settings.items() if key not in ("run_dir", "nproc")}


def _on_host(shard: Shard) -> Shard:
    if shard.data.device.type == "cpu":
        return shard
    # The copy waits for the device, so what is saved is the state of this step.
    return Shard(
        name=shard.name, kind=shard.kind, global_shape=shard.global_shape,
        flat_start=shard.flat_start, flat_stop=shard.flat_stop,
        data=shard.data.to(torch.device("cpu")),
    )  # fmt: skip
