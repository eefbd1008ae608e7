"""Between the layers of a rank and a recording of their experts: one to write, one to play."""

from collections.abc import Sequence

import torch

from moe_train.config import RunConfig
from moe_train.experts import MoE
from moe_train.recording import Recorder, Recording, header_of


class Tape:
    """Lets the layers replay a recording, or records them, if the run asks for it.

    Only training steps are replayed and recorded; a validation between them is routed by the
    routers.

    Args:
        config: The run.
        moes: The layers of this rank, in order.

    Raises:
        RunError: If the recording is of another run.
    """

    def __init__(self, config: RunConfig, moes: Sequence[MoE]):
        self.moes, self.config = moes, config
        folder = config.routing.replay
        self.recording = (
            None if folder is None else Recording(folder, header_of(config, len(moes), 0))
        )
        self._recorder: Recorder | None = None

    def check(self, first: int, last: int) -> None:
        """Raise unless the steps from ``first`` up to ``last`` can be replayed.

        Raises:
            RunError: If some were not recorded.
        """
        if self.recording is not None:
            self.recording.check(first, last)

    def before(self, step: int, place: int, count: int, device: torch.device) -> None:
        """Prepare the layers for a microbatch.

        Args:
            step: Counted from 0.
            place: Place of its first sequence in the batch of all ranks.
            count: Its sequences.
            device: Of the layers.
        """
        if self.recording is not None:
            expert_LBSK = self.recording.read(step, place, count, device)
            for moe, expert_BSK in zip(self.moes, expert_LBSK, strict=True):
                moe.replayed_TK = expert_BSK.flatten(0, 1)
        for moe in self.moes:
            moe.keeps_choice = self.config.log.record_experts is not None

    def after(self, step: int, place: int, count: int) -> None:
        """Let go of the microbatch, and write down what its tokens chose.

        Called after its backward pass, which may run the layers again.
        """
        for moe in self.moes:
            moe.replayed_TK, moe.keeps_choice = None, False
        folder = self.config.log.record_experts
        if folder is None:
            return
        if self._recorder is None:
            self._recorder = Recorder(folder, header_of(self.config, len(self.moes), step))
        chosen = [moe.chosen_TK for moe in self.moes if moe.chosen_TK is not None]
        expert_LBSK = torch.stack(chosen).unflatten(1, (count, -1))
        self._recorder.write(step, place, expert_LBSK)
        for moe in self.moes:
            moe.chosen_TK = None

    def close(self) -> None:
        """Close the recording that was written."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
