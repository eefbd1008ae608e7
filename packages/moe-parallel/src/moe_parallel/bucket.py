"""Parameters that lie in one buffer, and this rank's share of their optimizer state."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from moe_parallel.deferral import WeightGradient
from moe_parallel.layout import ALIGNMENT, BucketLayout, Segment, round_up
from moe_parallel.reduction import Reduction, Wire, reduce_scatter
from moe_parallel.shard import Shard

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",)}


class Bucket:
    """A flat buffer of parameters, with its gradients and this rank's slice of the state.

    The buffer is cut into one contiguous slice per rank of the group, all equally long; only
    its end is padded for that. A rank updates its slice and gets the others from their owners.

    The master weights of float32 and float64 parameters are the owner's slice of the buffer
    itself: they would hold the same values as a copy, which costs 4 bytes per element and a
    pass over memory each step. bfloat16 parameters have a float32 copy on their owner.

    Main gradients are written, not added to, by the first microbatch of a step, so that clearing
    them costs nothing. With ``transient`` they exist only from then until they are reduced.

    Memory per element under AdamW, in bytes, over ``W`` ranks: float32 4 + 4 + 8/W, bfloat16
    2 + 4 + 12/W (and 4/W more for the summed gradient if W > 1); 4 less if transient.

    Attributes:
        layout: What lies where.
        parameters: The parameters, in order.
        parameter_P: All of them, padded (P elements).
        master_S: This rank's slice in full precision (S = P / W elements).
        moments_S: Moments of the slice, by kind. Empty if frozen.
        grad_S: After ``wait_reduce``, this rank's slice of the gradient summed over the group.
        launched: Whether the reduction of this step has begun.
        transient: Whether the main gradients go once they are reduced.
        written: Whether the update has written this rank's parameters already.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[Parameter],
        group: dist.ProcessGroup | None,
        rank: int,
        world_size: int,
        *,
        wire: Wire = "float32",
        transient: bool = False,
    ):
        self.layout, self.parameters, self._group = layout, list(parameters), group
        self._world_size, self._wire, self.transient = world_size, wire, transient
        size = round_up(layout.segments[-1].stop, world_size * layout.granule)
        self._start, self._stop = (size // world_size * r for r in (rank, rank + 1))
        device = parameters[0].device
        self.parameter_P = torch.zeros(size, dtype=layout.dtype, device=device)
        self.own_S = self.parameter_P[self._start : self._stop]
        self._adopt()
        precise = torch.float64 if layout.dtype == torch.float64 else torch.float32
        self.master_S = self.own_S.to(precise)  # the same tensor if it is precise already
        kinds = MOMENTS["muon" if layout.matrix else "adamw"] if layout.trainable else ()
        self.moments_S = {kind: torch.zeros_like(self.master_S) for kind in kinds}
        self._main_grad_P: Tensor | None = None
        self._main_grads: list[Tensor] = []
        self._written = [False] * len(layout.segments)
        self._reduction: Reduction | None = None
        self.grad_S = self.master_S.new_empty(0)
        self.launched = self.written = False
        decays = dict.fromkeys(segment.weight_decay for segment in layout.segments)
        self._runs = {decay: list(self._find_runs(decay)) for decay in decays}
        self._gathering: dist.Work | None = None

    @torch.no_grad()
    def _adopt(self) -> None:
        """Move the parameters into the buffer. They stay the same objects."""
        for segment, parameter in zip(self.layout.segments, self.parameters, strict=True):
            place = self.parameter_P[segment.start : segment.stop].view(segment.shape)
            place.copy_(parameter)
            parameter.data = place

    def _find_runs(self, weight_decay: float) -> Iterator[slice]:
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

    def _open(self) -> list[Tensor]:
        """Return the main gradients of the parameters, making them where there are none."""
        if self.launched:
            names = ", ".join(segment.name for segment in self.layout.segments)
            raise RuntimeError(
                f"a gradient came after those of its bucket were reduced ({names}): a parameter "
                "is used outside of the blocks given to overlap(), or there was another backward "
                "after the one marked as last, or another Pipeline.step() without the optimizer's "
                "step() or zero_grad() between"
            )
        if self._main_grad_P is None:
            # Zero, since what lies between the parameters is reduced with them.
            self._main_grad_P = self.master_S.new_zeros(self.parameter_P.numel())
            self._main_grads = [
                self._main_grad_P[s.start : s.stop].view(s.shape) for s in self.layout.segments
            ]
        return self._main_grads

    def accumulate(self, indices: Iterable[int]) -> None:
        """Add ``.grad`` of some parameters into their main gradients and clear it."""
        sums, grads = [], []
        for i in indices:
            self._check_place(i)
            parameter = self.parameters[i]
            if parameter.grad is not None:
                main_grad = self._open()[i]
                if self._written[i]:
                    sums.append(main_grad)
                    grads.append(parameter.grad)
                else:
                    main_grad.copy_(parameter.grad)
                    self._written[i] = True
                parameter.grad = None
        if sums:
            torch._foreach_add_(sums, grads)

    def check_places(self) -> None:
        """Refuse parameters that no longer lie in the buffer."""
        for i in range(len(self.parameters)):
            self._check_place(i)

    def _check_place(self, index: int) -> None:
        parameter, segment = self.parameters[index], self.layout.segments[index]
        place = self.parameter_P.data_ptr() + segment.start * self.parameter_P.element_size()
        if segment.numel and parameter.data_ptr() != place:
            raise RuntimeError(
                f"{segment.name} was moved out of the optimizer's buffer, which the forward would "
                "no longer read: make the optimizer after .to() and the like, and write values "
                "into parameters in place"
            )

    def add(self, index: int, run: WeightGradient) -> None:
        """Let an operator write a weight gradient, or add it, straight to the main gradient."""
        main_grad = self._open()[index]
        run(main_grad, self._written[index])
        self._written[index] = True

    def start_reduce(self) -> None:
        """Begin to sum the main gradients over the group; each rank gets its slice."""
        for main_grad, written in zip(self._open(), self._written, strict=True):
            if not written:
                main_grad.zero_()
        main_grad_P = self._main_grad_P
        if main_grad_P is not None:
            self._reduction = reduce_scatter(main_grad_P, self._group, self._world_size, self._wire)
        self.launched = True

    def wait_reduce(self) -> None:
        """Wait for the sum (on a GPU: let the stream wait, not the host)."""
        if self._reduction is not None:
            self.grad_S = self._reduction.wait()
            self._reduction = None
        if self.transient and self.launched:
            self._main_grad_P, self._main_grads = None, []

    def start_gather(self) -> None:
        """Write the master weights to the parameters and begin to gather everyone's slice."""
        if self.has_copy and not self.written:
            self.own_S.copy_(self.master_S)
        self.written = False
        if self._world_size > 1:
            # As bytes: a copy needs no arithmetic, and not every backend has every dtype.
            self._gathering = dist.all_gather_into_tensor(
                self.parameter_P.view(torch.uint8),
                self.own_S.view(torch.uint8),
                group=self._group,
                async_op=True,
            )

    def wait_gather(self) -> None:
        """Wait for the parameters (on a GPU: let the stream wait, not the host)."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    @property
    def has_copy(self) -> bool:
        """Whether the master weights are a copy, and not the parameters themselves."""
        return self.master_S.data_ptr() != self.own_S.data_ptr()

    def zero_grad(self) -> None:
        """Forget the gradients. A sum that is on its way is waited for, as others take part."""
        self.wait_reduce()
        self._written = [False] * len(self._written)
        self.grad_S = self.master_S.new_empty(0)
        self.launched = False

    @property
    def decays(self) -> list[float]:
        """The weight decays of the parameters in this bucket."""
        return list(self._runs)

    def runs(self, weight_decay: float) -> list[slice]:
        """Return the stretches of this rank's slice that have this weight decay."""
        return self._runs[weight_decay]

    @cached_property
    def decay_C(self) -> Tensor:  # noqa: N802 - a tensor with one axis
        """The weight decay of every run of ``ALIGNMENT`` elements of the slice."""
        table_C = self.master_S.new_zeros(-(-self.master_S.numel() // ALIGNMENT))
        for decay, runs in self._runs.items():
            for run in runs:
                table_C[run.start // ALIGNMENT : -(-run.stop // ALIGNMENT)] = decay
        return table_C

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's state, as views."""
        for segment in self.layout.segments:
            start, stop = max(segment.start, self._start), min(segment.stop, self._stop)
            if start < stop:
                yield from self._shards_of(segment, start, stop)

    def _shards_of(self, segment: Segment, start: int, stop: int) -> Iterator[Shard]:
        offset = segment.global_start - segment.start
        own = slice(start - self._start, stop - self._start)
        for kind, state_S in (("master", self.master_S), *self.moments_S.items()):
            yield Shard(
                name=segment.name,
                kind=kind,
                global_shape=segment.global_shape,
                flat_start=start + offset,
                flat_stop=stop + offset,
                data=state_S[own],
            )
