"""Between a trainer and its checkpoints: what is saved, when it is safe, how it comes back."""

from types import TracebackType
from typing import Any, Self

import moe_ckpt
import torch
from moe_ckpt import Alone, AsyncSaver, Loaded
from moe_ckpt.torch_adapter import PinnedArena, background_communicator, communicator
from moe_parallel import Shard

from moe_train.config import RunConfig
from moe_train.data.training import TrainingData
from moe_train.folder import RunFolder
from moe_train.load_config import to_dict
from moe_train.trainer import Trainer


class Checkpoints:
    """The checkpoints of one run.

    With ``train.async_save`` the steps wait for a copy in host memory only, and a thread writes
    and commits; a save that fails there is found by ``poll`` and raised by ``settle``. Leaving
    the context waits for the save that is running.

    Args:
        folder: The run's folder.
        trainer: Whose state is saved.
        data: The text, whose digest is kept with the state.
    """

    def __init__(self, folder: RunFolder, trainer: Trainer, data: TrainingData):
        self.folder, self.trainer, self.data = folder, trainer, data
        config, group = trainer.config.train, trainer.mesh.world_group
        self.comm = Alone() if group is None else communicator(group)
        self.saver: AsyncSaver | None = None
        if config.async_save:
            self.saver = AsyncSaver(
                folder.checkpoints,
                comm=Alone() if group is None else background_communicator(group),
                buffer=PinnedArena() if trainer.device.type == "cuda" else None,
                keep=config.keep,
                overwrite=True,
            )
        self._running: int | None = None
        self._committed: list[int] = []
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.saver is not None:
            self.saver.__exit__(kind, error, at)

    def save(self, *, target: int, seconds: float, tokens: int) -> None:
        """Save the state of this step. A collective call.

        Args:
            target: Step at which this start of the run ends; 0 for a run that is still to begin.
            seconds: Training time so far, over all starts.
            tokens: Tokens trained on so far.
        """
        trainer = self.trainer
        state = {
            **trainer.counters(),
            "target": target,
            "first_target": trainer.first_target if target else 0,
            "seconds": seconds,
            "tokens": tokens,
            "corpus": {"digest": self.data.digest, "origin": self.data.origin},
            "config": portable(trainer.config),
        }
        if self.saver is not None:
            self.settle()
            self.saver.save(trainer.shards(), step=trainer.steps_done, state=state)
            self._running = trainer.steps_done
            return
        moe_ckpt.save(
            self.folder.checkpoints,
            [_on_host(shard) for shard in trainer.shards()],
            step=trainer.steps_done,
            state=state,
            comm=self.comm,
            keep=trainer.config.train.keep,
            overwrite=True,
        )
        self._committed.append(trainer.steps_done)

    def poll(self) -> bool:
        """Return whether a save in the background has failed on this rank; never wait."""
        if self.saver is not None and not self.saver.busy:
            self._wait(self.saver)
        return self._error is not None

    def settle(self) -> None:
        """Wait for the save that is running, if any, and raise what made it fail.

        Call it on every rank once one has seen a failure.
        """
        if self.saver is not None:
            self._wait(self.saver)
        if self._error is not None:
            raise self._error

    def take_committed(self) -> list[int]:
        """Return the steps that have become safe since the last call."""
        committed, self._committed = self._committed, []
        return committed

    def _wait(self, saver: AsyncSaver) -> None:
        try:
            saver.wait()
        except Exception as error:
            self._error = error
        if self._error is None and self._running is not None:
            self._committed.append(self._running)
        self._running = None

    def load(self) -> Loaded:
        """Take over the newest checkpoint whose every byte is as it was written.

        A collective call.

        Returns:
            The checkpoint's step and state, and what was passed over to find it.
        """
        live = self.trainer.shards()
        host = [_on_host(shard) for shard in live]
        averaged = self.trainer.averages is not None
        loaded = moe_ckpt.load(
            self.folder.checkpoints,
            host,
            comm=self.comm,
            # Averages may be begun in a run, or given up.
            allow_missing=["*/ema"] if averaged else [],
            allow_extra=[] if averaged else ["*/ema"],
        )
        for shard, copy in zip(live, host, strict=True):
            if copy is not shard:
                shard.data.copy_(copy.data)
        state = loaded.state
        self.trainer.loaded(
            steps_done=state["steps_done"],
            samples_seen=state["samples_seen"],
            step_count=state["step_count"],
            first_target=state.get("first_target", 0),
            losses=state.get("losses", []),
            new_averages=bool(loaded.missing),
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
