"""Parameters that lie in one buffer, and this rank's share of their optimizer state."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from moe_parallel.layout import ALIGNMENT, BucketLayout, Segment, round_up
from moe_parallel.shard import Shard


class Bucket:
    """A flat buffer of parameters, with its gradients and this rank's slice of the state.

    The buffer is cut into one contiguous slice per rank of the group, all equally long; only
    its end is padded for that. A rank updates its slice and gets the others from their owners.

    The master weights of float32 and float64 parameters are the owner's slice of the buffer
    itself: they would hold the same values as a copy, which costs 4 bytes per element and a
    pass over memory each step. bfloat16 parameters have a float32 copy on their owner.

    Memory per element, in bytes, over ``W`` ranks: float32 4 + 4 + 8/W, bfloat16 2 + 4 + 12/W
    (and 4/W more for the summed gradient if W > 1).

    Attributes:
        layout: What lies where.
        parameter_P: All parameters, padded (P elements).
        main_grad_P: Their gradients summed over microbatches, float32 or float64. Empty if frozen.
        master_S: This rank's slice in full precision (S = P / W elements).
        exp_avg_S: First moment. Empty if frozen.
        exp_avg_sq_S: Second moment. Empty if frozen.
        grad_S: After ``wait``, this rank's slice of the gradient summed over the group.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[Parameter],
        group: dist.ProcessGroup | None,
        rank: int,
        world_size: int,
    ):
        self.layout, self._parameters, self._group = layout, list(parameters), group
        size = round_up(layout.segments[-1].stop, world_size * ALIGNMENT)
        self._start, self._stop = (size // world_size * r for r in (rank, rank + 1))
        self._world_size = world_size
        device = parameters[0].device
        self.parameter_P = torch.zeros(size, dtype=layout.dtype, device=device)
        self._own_S = self.parameter_P[self._start : self._stop]
        self._adopt()
        precise = torch.float64 if layout.dtype == torch.float64 else torch.float32
        self.master_S = self._own_S.to(precise)  # the same tensor if it is precise already
        state = {"dtype": precise, "device": device}
        trained = layout.trainable
        self.main_grad_P = torch.zeros(size if trained else 0, **state)
        self.exp_avg_S = torch.zeros(self.master_S.numel() if trained else 0, **state)
        self.exp_avg_sq_S = torch.zeros_like(self.exp_avg_S)
        self.grad_S = self.main_grad_P
        self._main_grads = (
            [self.main_grad_P[s.start : s.stop].view(s.shape) for s in layout.segments]
            if trained
            else []
        )
        self._runs = {decay: list(self._find_runs(decay)) for decay in (True, False)}
        self._work: dist.Work | None = None

    @torch.no_grad()
    def _adopt(self) -> None:
        """Move the parameters into the buffer. They stay the same objects."""
        for segment, parameter in zip(self.layout.segments, self._parameters, strict=True):
            place = self.parameter_P[segment.start : segment.stop].view(segment.shape)
            place.copy_(parameter)
            parameter.data = place

    def _find_runs(self, weight_decay: bool) -> Iterator[slice]:
        """Yield the stretches of this rank's slice with one treatment, padding included."""
        run: slice | None = None
        for segment in self.layout.segments:
            start = max(segment.start, self._start) - self._start
            stop = min(segment.padded_stop, self._stop) - self._start
            if start >= stop or segment.weight_decay != weight_decay:
                continue
            if run is not None and run.stop == start:
                run = slice(run.start, stop)
                continue
            if run is not None:
                yield run
            run = slice(start, stop)
        if run is not None:
            yield run

    def accumulate(self) -> None:
        """Add each ``.grad`` into the main gradient and clear it."""
        sums, grads = [], []
        for parameter, main_grad in zip(self._parameters, self._main_grads, strict=True):
            if parameter.grad is not None:
                sums.append(main_grad)
                grads.append(parameter.grad)
                parameter.grad = None
        if sums:
            torch._foreach_add_(sums, grads)

    def start_reduce(self) -> None:
        """Begin to sum the main gradients over the group; each rank gets its slice."""
        if self._world_size > 1:
            self.grad_S = torch.empty_like(self.exp_avg_S)
            self._work = dist.reduce_scatter_tensor(
                self.grad_S, self.main_grad_P, group=self._group, async_op=True
            )

    def start_gather(self) -> None:
        """Write the master weights to the parameters and begin to gather everyone's slice."""
        if self.master_S.data_ptr() != self._own_S.data_ptr():
            self._own_S.copy_(self.master_S)
        if self._world_size > 1:
            # As bytes: a copy needs no arithmetic, and not every backend has every dtype.
            self._work = dist.all_gather_into_tensor(
                self.parameter_P.view(torch.uint8),
                self._own_S.view(torch.uint8),
                group=self._group,
                async_op=True,
            )

    def wait(self) -> None:
        """Wait for what was begun (on a GPU: let the stream wait, not the host)."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.main_grad_P.zero_()
        self.grad_S = self.main_grad_P

    def runs(self, weight_decay: bool) -> tuple[list[Tensor], ...]:
        """Return views of master, gradient and both moments where weight decay does (not) apply."""
        state = (self.master_S, self.grad_S, self.exp_avg_S, self.exp_avg_sq_S)
        return tuple([tensor[run] for run in self._runs[weight_decay]] for tensor in state)

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's state, as views."""
        for segment in self.layout.segments:
            start, stop = max(segment.start, self._start), min(segment.stop, self._stop)
            if start < stop:
                yield from self._shards_of(segment, start, stop)

    def _shards_of(self, segment: Segment, start: int, stop: int) -> Iterator[Shard]:
        offset = segment.global_start - segment.start
        own = slice(start - self._start, stop - self._start)
        yield Shard(
            name=segment.name,
            kind="master",
            global_shape=segment.global_shape,
            flat_start=start + offset,
            flat_stop=stop + offset,
            data=self.master_S[own],
        )
        if self.layout.trainable:
            for kind, moment_S in (("exp_avg", self.exp_avg_S), ("exp_avg_sq", self.exp_avg_sq_S)):
                yield Shard(
                    name=segment.name,
                    kind=kind,
                    global_shape=segment.global_shape,
                    flat_start=start + offset,
                    flat_stop=stop + offset,
                    data=moment_S[own],
                )
