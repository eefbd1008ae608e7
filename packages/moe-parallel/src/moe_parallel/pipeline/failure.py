"""An exception of one rank, told to all."""

from typing import NamedTuple

from moe_parallel.schedule import Op

_KINDS = ("F", "B", "I", "W")


class Failure(NamedTuple):
    """Where a stage raised.

    Attributes:
        rank: The rank of the mesh.
        op: The operation that it was running.
    """

    rank: int
    op: Op

    def encode(self) -> list[int]:
        """Return it as four integers."""
        return [self.rank, _KINDS.index(self.op.kind), self.op.stage, self.op.micro]

    @classmethod
    def decode(cls, numbers: list[int]) -> "Failure":
        """Read what ``encode`` wrote."""
        rank, kind, stage, micro = numbers
        return cls(rank, Op(_KINDS[kind], stage, micro))


class StageError(RuntimeError):
    """A stage of the pipeline raised, here or on another rank. Every rank raises this.

    On the rank where it happened, ``__cause__`` is the exception itself.

    Attributes:
        rank: The rank of the mesh.
        stage: The stage.
        micro: The microbatch.
        kind: ``F``, ``B``, ``I`` or ``W``, see ``Op``.
    """

    def __init__(self, failure: Failure, reason: str):
        self.rank, (self.kind, self.stage, self.micro) = failure.rank, failure.op
        what = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradient"}
        super().__init__(
            f"rank {self.rank} raised in the {what[self.kind]} of stage {self.stage}, "
            f"microbatch {self.micro}: {reason}"
        )


class PeerFailedError(Exception):
    """A message says that its sender has nothing to send, since some stage raised."""

    def __init__(self, failure: Failure):
        self.failure = failure
        super().__init__(str(failure))
