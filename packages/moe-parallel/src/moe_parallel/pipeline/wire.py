"""Messages between the stages of a pipeline: any number of tensors, of any shapes."""

from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe_parallel.pipeline.failure import Failure, PeerFailedError
from moe_parallel.pipeline.header import LENGTH, Form, read_header, write_failure, write_header
from moe_parallel.pipeline.links import Links
from moe_parallel.schedule import Op, Schedule

_HEADER, _DATA = 1, 2


class Wire:
    """The messages of one rank in one step.

    A message is named by the operation that needs it. Both sides know from the schedule in which
    order a neighbour's messages come, so the names do not travel. A header goes ahead of each over
    the CPU and says what is coming: shapes may change from one microbatch to the next, and no
    device is waited for. (The host waits until the sending host has launched its operation.)

    Every message of the schedule is sent and received even if a stage raises: the sender then
    says so in the header. So nobody waits for what never comes, and the groups stay usable.

    Args:
        schedule: The schedule of this step.
        links: The process groups.
        rank: This rank in the pipeline.
        device: Where tensors live.
    """

    def __init__(self, schedule: Schedule, links: Links, rank: int, device: torch.device):
        self._links, self._rank, self._device = links, rank, device
        self._receiver = {op: to for to, op in schedule.sends(rank)}
        self._coming: dict[int, deque[Op]] = {}
        self._sender: dict[Op, int] = {}
        for other in range(schedule.num_ranks):
            ops = [op for to, op in schedule.sends(other) if to == rank]
            self._coming[other] = deque(ops)
            self._sender.update(dict.fromkeys(ops, other))
        self._arrived: dict[Op, list[Tensor] | Failure] = {}
        self._sending: list[tuple[Tensor, dist.Work]] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def brings(self, op: Op) -> bool:
        """Return whether another rank sends what ``op`` needs."""
        return op in self._sender

    def send(self, op: Op, tensors: Sequence[Tensor]) -> None:
        """Begin to send what ``op``, on another rank, needs."""
        # Whatever can fail comes first: after the header the receiver counts on the rest.
        header = write_header(tensors)
        # Half of the dtypes are unknown to some backend; bytes are known to all.
        lines = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors if t.numel()]
        to = self._receiver.pop(op)
        self._start(header, to, self._links.control, _HEADER)
        for line in lines:
            self._start(line, to, self._links.edges[self._rank, to], _DATA)

    def send_failure(self, op: Op, failure: Failure) -> None:
        """Say that what ``op`` needs will not come, unless it has been sent already."""
        to = self._receiver.pop(op, None)
        if to is not None:
            self._start(write_failure(failure), to, self._links.control, _HEADER)

    def receive(self, op: Op) -> list[Tensor]:
        """Return what ``op`` needs; those that the sender wants a gradient for require it.

        Raises:
            PeerFailedError: If a stage raised and the sender therefore has nothing to send.
        """
        sender = self._sender.pop(op)
        while op not in self._arrived:
            self._receive_next(sender)
        message = self._arrived.pop(op)
        if isinstance(message, Failure):
            raise PeerFailedError(message)
        return message

    def discard(self, op: Op) -> None:
        """Receive and forget what ``op`` needs, unless it has been received already."""
        if op in self._sender:
            try:
                self.receive(op)
            except PeerFailedError:
                return

    def finish(self) -> None:
        """Wait until everything is sent (on a GPU: let the stream wait)."""
        for _, work in self._sending:
            work.wait()
        self._sending.clear()

    def _start(self, data: Tensor, to: int, group: dist.ProcessGroup | None, tag: int) -> None:
        work = dist.isend(data, self._links.ranks[to], group=group, tag=tag)
        if work is None:
            raise RuntimeError(f"this rank is not in the group that it sends to {to} over")
        if self._stream is not None:
            # Gradients and activations that have been sent need not be kept to the step's end.
            self._sending = [(d, w) for d, w in self._sending if not w.is_completed()]
        self._sending.append((data, work))

    def _receive_next(self, sender: int) -> None:
        """Receive the next message of a neighbour, whichever operation it is for."""
        op = self._coming[sender].popleft()
        header = torch.empty(LENGTH, dtype=torch.int64)
        source = self._links.ranks[sender]
        dist.recv(header, source, group=self._links.control, tag=_HEADER)
        forms = read_header(header)
        if isinstance(forms, Failure):
            self._arrived[op] = forms
        else:
            self._arrived[op] = list(self._receive_tensors(forms, sender))

    def _receive_tensors(self, forms: list[Form], sender: int) -> Iterator[Tensor]:
        group = self._links.edges[sender, self._rank]
        for form in forms:
            with torch.cuda.stream(self._stream):
                # On a stream of its own, receiving does not wait for what was launched before.
                tensor = torch.empty(form.shape, dtype=form.dtype, device=self._device)
                work = None
                if tensor.numel():
                    data = tensor.view(-1).view(torch.uint8)
                    work = dist.irecv(data, self._links.ranks[sender], group=group, tag=_DATA)
            if work is not None:
                work.wait()
            if self._stream is not None:
                tensor.record_stream(torch.cuda.current_stream(self._device))
            yield tensor.requires_grad_(form.requires_grad)
