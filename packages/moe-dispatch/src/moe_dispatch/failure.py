"""What is raised when a rank waits in vain."""


class PeerError(RuntimeError):
    """A rank did not come in time, gave up or died.

    After it the channel is of no more use: close it, and open another one with the ranks that are
    left.

    Attributes:
        rank: Who raises.
        source: Who is to blame, as far as this rank knows: the first rank that it waited for in
            vain, or that this one had waited for; -1 if this rank itself gave up.
        phase: What was waited for: ``"COUNTS"``, ``"ROWS"``, ``"ROWS_FREE"``, ``"RESULTS"``,
            ``"RESULTS_FREE"``; ``"ABORTED"`` if this rank gave up.
        layer: Whose exchange it was.
        epoch: The signal that was expected.
        seen: The last signal that was received, -1 if it was that a rank gave up.
        num_late: How many ranks were late.
    """

    def __init__(
        self,
        rank: int,
        source: int,
        phase: str,
        layer: str,
        epoch: int,
        seen: int,
        num_late: int,
        world_size: int,
        deadline: float,
        rows: str = "",
        by: int | None = None,
    ):
        self.rank, self.source, self.phase, self.layer = rank, source, phase, layer
        self.epoch, self.seen, self.num_late = epoch, seen, num_late
        where = f"{phase} of layer {layer!r}, epoch {epoch}"
        if source < 0:
            text = f"rank {rank} gave up"
        elif by == source:
            text = f"rank {rank}, {where}: rank {source} gave up; see its own error"
        elif by is not None:
            text = f"rank {rank}, {where}: rank {by} gave up waiting for rank {source}"
        else:
            text = (
                f"rank {rank}, {where}: rank {source} did not come within {deadline:g} s: "
                f"expected signal {epoch}, received {seen}"
            )
        if source >= 0:
            text += f"; {world_size - num_late} of {world_size} ranks had come{rows}"
        super().__init__(text)
