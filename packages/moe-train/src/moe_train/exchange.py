"""How rows reach the ranks of their experts, and what to do when a buffer was too small.

With ``mesh.overflow = retry`` a receive buffer holds ``capacity_factor`` times the mean. Where
more rows come, a flag is raised on the device: the step changes nothing on any rank, nor do those
after it, until the host, which looks one step late, makes the buffer larger and repeats them. So
no host waits, no row is lost, and the run is that of a buffer that was large enough, bit for bit.
"""

import importlib
from collections import deque
from typing import Any, NamedTuple, Self

import torch
from moe_dispatch import Dispatcher, RowPlan, make_dispatcher
from moe_parallel import Mesh
from torch import Tensor, nn

from moe_train.config import RunConfig
from moe_train.errors import RunError
from moe_train.evaluation import share_at_once
from moe_train.experts import MoE
from moe_train.ranks import TIMEOUT


class _Unknown(NamedTuple):
    """A step of which the host does not know yet whether it stands.

    Attributes:
        step: Its number, counted from 0.
        samples: Sequences seen before it.
        flag: float64 in host memory, not 0 if a buffer was too small.
        copied: When the flag is there; None: it is.
    """

    step: int
    samples: int
    flag: Tensor
    copied: torch.cuda.Event | None


class Exchange:
    """The dispatcher of a model, and the steps that a buffer may have been too small for.

    Args:
        config: The run.
        mesh: This rank's place.
        device: Where rows are.

    Attributes:
        dispatcher: The one in use.

    Raises:
        RunError: If memory that other ranks can write to is asked for and cannot be had.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device):
        self._mesh, self._device = mesh, device
        self._num_experts, self._plan = config.model.num_experts, row_plan(config, mesh)
        self._unknown: deque[_Unknown] = deque()
        self._notes: list[str] = []
        self.dispatcher = self._open()

    @property
    def can_overflow(self) -> bool:
        """Whether a step may have to be repeated."""
        return self._plan is not None and self._plan.overflow == "retry"

    def overflow(self) -> Tensor:
        """Return the rows that did not fit since the last ``grow``: 0-dim, float64, on the device.

        The number is that of this rank's expert group; sum it over all ranks.
        """
        if not self.can_overflow:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return self._rowwise.overflow.double()

    def note(self, step: int, samples: int, flag: Tensor) -> None:
        """Take note of a step whose flag, summed over all ranks, the host will look at later."""
        if not self.can_overflow:
            return
        if self._device.type == "cpu":
            self._unknown.append(_Unknown(step, samples, flag.clone(), None))
            return
        host = torch.empty((), dtype=torch.float64, pin_memory=True)
        host.copy_(flag, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._unknown.append(_Unknown(step, samples, host, copied))

    def first_failed(self, unknown: int) -> tuple[int, int] | None:
        """Return the first step that does not stand, and the sequences seen before it.

        Args:
            unknown: How many of the last steps may stay unknown, so that the host need not wait.
        """
        while len(self._unknown) > unknown:
            step, samples, flag, copied = self._unknown.popleft()
            if copied is not None:
                copied.synchronize()
            if float(flag):
                self._unknown.clear()
                return step, samples
        return None

    def take_notes(self) -> list[str]:
        """Return what people should know since the last call: buffers that were made larger."""
        notes, self._notes = self._notes, []
        return notes

    def grow(self, model: nn.Module) -> None:
        """Make the buffers large enough for what came. A collective call of all ranks.

        Where nothing overflowed, the buffer stays.

        Args:
            model: Whose layers get the new dispatcher.
        """
        plan, rows = self._plan, int(self._rowwise.most_rows)
        self._rowwise.clear_overflow()
        if plan is None or rows <= plan.capacity:
            return
        self._rowwise.close()
        self._plan = plan.grown(rows)
        self._notes.append(
            f"{rows} rows came to a rank with room for {plan.capacity}: the buffer now holds "
            f"{self._plan.capacity}, and the step is repeated"
        )
        self.dispatcher = self._open()
        for module in model.modules():
            if isinstance(module, MoE):
                module.dispatcher = self.dispatcher

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Give the memory back; after an error, tell the others not to wait for this rank."""
        if self._plan is not None:
            self._rowwise.__exit__(kind, *rest)

    @property
    def _rowwise(self) -> Any:
        # Its class is not imported here: that needs Triton, which only its users have to have.
        return self.dispatcher

    def _open(self) -> Dispatcher:
        plan, device = self._plan, self._device
        if plan is not None and device.type == "cuda":
            warm_up = importlib.import_module("moe_dispatch.rowwise").warm_up
            warm_up(plan, device)
        try:
            made: Any = make_dispatcher(
                self._num_experts, self._mesh.ep_group, plan=plan, device=device
            )
        except RuntimeError as error:
            raise RunError(f"mesh.dispatcher 'rowwise' cannot be used here: {error}") from error
        if plan is not None:
            # As for every other wait between ranks: one of them may be busy with a report.
            made.channel.deadline = TIMEOUT.total_seconds()
        return made


def row_plan(config: RunConfig, mesh: Mesh) -> RowPlan | None:
    """Return the sizes of a row-wise exchange, or None where rows travel otherwise."""
    c, plan = config.mesh, mesh.plan
    factor = c.capacity_factor if c.overflow == "retry" else None
    if c.dispatcher != "rowwise" or plan.ep == 1:
        return None
    micro = config.train.microbatch_size or config.train.batch_size // plan.dp
    sequences = max(micro, share_at_once(plan.dp))
    dtype = getattr(torch, config.train.dtype)
    return RowPlan(
        world_size=plan.ep,
        num_experts=config.model.num_experts,
        max_tokens=sequences * config.data.sequence_length,
        top_k=config.model.top_k,
        dim=config.model.latent_dim or config.model.dim,
        dtype=dtype,
        weight_dtype=torch.promote_types(dtype, torch.float32),
        overflow=c.overflow,
        capacity_factor=factor,
    )
