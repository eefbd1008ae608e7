"""The way to ranks that are not mapped: what is staged, and how kernels with NVSHMEM start."""

import importlib
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from moe_dispatch.doctor.versions import check_versions
from moe_dispatch.rowwise.protocol import Clock, Kind
from moe_dispatch.rowwise.slots import Slots

if TYPE_CHECKING:
    from moe_dispatch.rowwise.channel import Channel

LIBRARY = "libnvshmem_device"


class Remote:
    """Launches the kernels with NVSHMEM calls, for the ranks that are not mapped.

    Every kernel is a module of its own that NVSHMEM has to be told of before it runs.

    Args:
        channel: On an ``NvshmemHeap``, with a plan that is ``staged``.
        bitcode: Path of NVSHMEM's device library.
    """

    def __init__(self, channel: "Channel", bitcode: str):
        self.channel, self.libs = channel, {LIBRARY: bitcode}
        self.kernels = importlib.import_module("moe_dispatch.rowwise.remote.kernel")
        self._known: set[int] = set()

    @classmethod
    def of(cls, channel: "Channel") -> Self | None:
        """Return the way to ranks that are not mapped, or None if all are.

        Raises:
            ValueError: If there are such ranks, and the plan has no stage for them.
            RuntimeError: If NVSHMEM's bitcode is missing or of another version.
        """
        unmapped = (channel.heap.bases_W == 0).nonzero().flatten().tolist()
        if not unmapped:
            return None
        if not channel.plan.staged:
            raise ValueError(
                f"the memory of rank {', '.join(map(str, unmapped))} cannot be mapped here: "
                "make the plan with staged=True"
            )
        _, device = check_versions(torch.cuda.get_device_capability(channel.heap.local.device))
        if device is None:
            raise RuntimeError("there is no NVSHMEM bitcode, which ranks on other machines need")
        return cls(channel, str(device.path))

    def signal(self, kind: int, clock: int, lag: int) -> None:
        """Signal the ranks that are not mapped."""
        channel = self.channel
        self._launch(
            self.kernels.signal_remote_kernel, channel.world_size, channel.at("signals"), kind,
            channel.rank, clock, lag, W=channel.world_size,
        )  # fmt: skip

    def abort(self) -> None:
        """Signal them that this rank has given up, which its state says by now."""
        for kind in Kind:
            self.signal(int(kind), int(Clock.PUTS), 0)

    def tell_counts(self, told_M: Tensor) -> None:
        """Put counts and their signal."""
        channel, plan = self.channel, self.channel.plan
        channel.views["stage_counts"].copy_(told_M)
        self._launch(
            self.kernels.tell_counts_remote_kernel, channel.world_size,
            channel.at("stage_counts"), channel.at("counts"), channel.at("signals"),
            int(Kind.COUNTS), channel.rank, W=channel.world_size, M=plan.told,
        )  # fmt: skip

    def put_rows(self, x_TN: Tensor, slots: Slots, weight_TK: Tensor | None) -> None:
        """Put rows, and their weights if there are any."""
        channel, plan = self.channel, self.channel.plan
        T, N = x_TN.shape
        channel.views["stage_rows"].view(x_TN.dtype)[:T, :N].copy_(x_TN)
        if weight_TK is not None:
            channel.views["stage_weight"][:T].copy_(weight_TK)
        self._launch(
            self.kernels.put_rows_remote_kernel, T, slots.to_TK, slots.place_TK,
            channel.at("stage_rows"), channel.at("stage_weight"), channel.at("rows"),
            channel.size("rows"), channel.at("weight"), channel.size("weight"), channel.rank,
            int(Clock.PUTS), ROW_BYTES=plan.row_bytes, SENT_BYTES=N * x_TN.element_size(),
            WEIGHT_BYTES=plan.wide.itemsize, K=plan.top_k, META=weight_TK is not None,
        )  # fmt: skip

    def fetch_rows(self, slots: Slots, scalars: bool) -> None:
        """Get results, and their scalars if there are any, to where the sum looks for them."""
        channel, plan = self.channel, self.channel.plan
        self._launch(
            self.kernels.get_rows_remote_kernel, len(slots.to_TK), slots.to_TK, slots.place_TK,
            channel.at("stage_results"), channel.at("stage_scalars"), channel.at("results"),
            channel.size("results"), channel.at("scalars"), channel.size("scalars"),
            channel.rank, int(Clock.RETURNS), ROW_BYTES=plan.row_bytes,
            SENT_BYTES=plan.dim * plan.dtype.itemsize, WEIGHT_BYTES=plan.wide.itemsize,
            K=plan.top_k, SCALARS=scalars,
        )  # fmt: skip

    def _launch(self, kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        if not programs:
            return
        heap: Any = self.channel.heap
        given = (heap.bases_W, heap.pes_W, self.channel.state, *args)
        options = {"extern_libs": self.libs, **constants}
        compiled = kernel.warmup(*given, grid=(programs,), **options)
        compiled._init_handles()
        if compiled.module not in self._known:
            self._known.add(compiled.module)
            heap.nv.module_init(heap.nv.NvshmemKernelObject.from_handle(compiled.module))
        kernel[(programs,)](*given, **options)
