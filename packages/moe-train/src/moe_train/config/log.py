"""What a run tells about itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_train.config.rules import require, require_positive

_LEAST_WINDOW = 4
_MOST_PROFILED = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What a run tells about itself, and where, besides ``metrics.jsonl`` and the report.

    Attributes:
        experts: Record the load of every expert; without it records grow with layers alone.
        window: Records over which the alarms of the routers look back, an even number.
        gerrymander: Alarm when, over the window, a layer's balance score fell by at least so much
            while the distance of its load from even rose by at least so much.
        record_experts: Folder to record every choice of experts in, for ``routing.replay``.
        tensorboard: Write events for TensorBoard into ``tensorboard`` in the run's folder; needs
            the extra ``moe-train[tensorboard]``.
        wandb: Send the records to Weights & Biases; needs the extra ``moe-train[wandb]``.
        wandb_project: The project there.
        wandb_mode: ``offline`` writes what can be sent later.
        profile: Steps to profile, first and last, such as ``10:13``; rank 0 writes a trace and a
            table into ``profile`` in the run's folder. Empty for none.
        memory_snapshot: Also write every allocation of those steps; on a GPU.
        nvtx: Mark operators and parts of layers for Nsight Systems; on a GPU.
    """

    experts: bool = True
    window: int = 20
    gerrymander: float = 0.05
    record_experts: Path | None = None
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "moe-train"
    wandb_mode: Literal["online", "offline"] = "online"
    profile: str = ""
    memory_snapshot: bool = False
    nvtx: bool = False

    def __post_init__(self) -> None:
        require_positive(gerrymander=self.gerrymander)
        require(
            self.window >= _LEAST_WINDOW and self.window % 2 == 0,
            f"window must be even and at least {_LEAST_WINDOW}, got {self.window}",
        )
        require(bool(self.wandb_project), "wandb_project must not be empty")
        steps = self.profile_steps
        require(
            not self.memory_snapshot or steps is not None,
            "memory_snapshot needs the steps to take it of, in profile",
        )
        require(
            not self.nvtx or steps is None,
            f"nvtx and profile {self.profile} do not go together: torch profiles one way at a time",
        )

    @property
    def profile_steps(self) -> tuple[int, int] | None:
        """The first and the last step to profile, counted from 1, or None."""
        if not self.profile:
            return None
        first, colon, last = self.profile.partition(":")
        usable = bool(colon) and first.isdecimal() and last.isdecimal()
        require(
            usable and 1 <= int(first) <= int(last),
            f"profile must be a first and a last step from 1 on, such as 10:13, got "
            f"{self.profile!r}",
        )
        steps = int(first), int(last)
        require(
            steps[1] - steps[0] < _MOST_PROFILED,
            f"profile must be at most {_MOST_PROFILED} steps, got {self.profile}: a longer trace "
            "opens nowhere",
        )
        return steps
