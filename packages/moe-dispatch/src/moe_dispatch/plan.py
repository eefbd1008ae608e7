"""What the ranks agree on before any row travels: sizes, policies, and who needs how many bytes."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from moe_dispatch.check import DTYPES, check_num_experts

Overflow = Literal["exact", "capacity", "retry"]
Combine = Literal["pull", "push"]
Wire = Literal["plain", "mxfp8"]

MX_BLOCK = 32
ROW_ALIGN = 16
"""Bytes. Rows begin at multiples of it, so that a thread stores 16 bytes at once."""
FIELD_ALIGN = 256
INT32_MAX = 2**31 - 1
NUM_KINDS = 8
"""Places for signals of one rank, of which ``Kind`` uses some."""
NUM_TERMS = 2
"""What a rank tells beside its counts: its bad ids, and whether it wants gradients."""


class Field(NamedTuple):
    """One array on the heap, at the same offset on every rank.

    Attributes:
        at: Offset in bytes.
        shape: Of which the first axis is the parity where there are two buffers.
        dtype: Of the elements.
    """

    at: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlan:
    """The terms of a row-wise exchange, the same on every rank.

    Attributes:
        world_size: W.
        num_experts: E, a multiple of W.
        max_tokens: The most tokens of any rank in one dispatch.
        top_k: K.
        dim: D.
        dtype: Of the rows.
        weight_dtype: Of the routing weights, float32 or float64.
        overflow: What happens when more rows come to a rank than its buffer holds. ``"exact"``:
            they cannot, it holds the most that can come. ``"capacity"``: fair shares of sources
            and experts stay, the rest is dropped and counted. ``"retry"``: a flag is raised on
            the device and the step has to be repeated with a larger buffer.
        capacity_factor: Rows that the buffer holds, as a multiple of the mean ``T * K``. Only
            for ``"capacity"`` and ``"retry"``.
        dedup: Whether a token travels once to a rank that has several of its experts.
        combine: Whether owners pull results, or experts push them.
        wire: ``"mxfp8"`` sends tokens, forward, as float8 with a scale for each 32 values.
            Results and gradients travel in ``dtype``.
        staged: Whether ranks may be out of reach of loads and stores, on other machines. Their
            rows go through a stage on the heap and NVSHMEM's calls; not with ``dedup`` or
            ``"push"``.

    Raises:
        ValueError: If sizes do not fit together, naming them and the rule.

    Examples:
        >>> plan = RowPlan(world_size=8, num_experts=64, max_tokens=4096, top_k=8, dim=2048,
        ...                overflow="capacity", capacity_factor=1.25)
        >>> plan.capacity, plan.hard_bound
        (40960, 262144)
    """

    world_size: int
    num_experts: int
    max_tokens: int
    top_k: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.float32
    overflow: Overflow = "exact"
    capacity_factor: float | None = None
    dedup: bool = False
    combine: Combine = "pull"
    wire: Wire = "plain"
    staged: bool = False

    def __post_init__(self) -> None:
        check_num_experts(self.num_experts, self.world_size)
        _check_choices(self)
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k must be in 1..num_experts ({self.num_experts}), got {self.top_k}"
            )
        if self.max_tokens < 0 or self.dim < 1:
            raise ValueError(
                f"max_tokens must be at least 0 and dim at least 1, "
                f"got {self.max_tokens} and {self.dim}"
            )
        for what, number in (
            ("world_size * max_tokens * top_k", self.world_size * self.max_tokens * self.top_k),
            ("the rows of a receive buffer", max(self.capacity, self.num_places)),
        ):
            if number > INT32_MAX:
                raise ValueError(
                    f"{what} must fit in 32 bits (at most {INT32_MAX}), got {number}: "
                    "use fewer tokens in one dispatch"
                )

    @property
    def e(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.world_size

    @property
    def hard_bound(self) -> int:
        """The most rows that can come to a rank: every route of every token that can."""
        return self.world_size * self.max_tokens * min(self.top_k, self.e)

    @property
    def capacity(self) -> int:
        """Rows that the experts of a rank can be given."""
        if self.capacity_factor is None:
            return self.hard_bound
        return min(self.hard_bound, math.ceil(self.capacity_factor * self.max_tokens * self.top_k))

    @property
    def num_places(self) -> int:
        """Rows of the receive buffer. With ``dedup`` one for each token of every rank."""
        return self.world_size * self.max_tokens if self.dedup else self.capacity

    @property
    def wide(self) -> torch.dtype:
        """In which weights travel and weighted sums run."""
        wide = torch.float64 in {self.dtype, self.weight_dtype}
        return torch.float64 if wide else torch.float32

    @property
    def row_bytes(self) -> int:
        """Bytes from one row of a buffer to the next."""
        return _round_up(self.dim * self.dtype.itemsize, ROW_ALIGN)

    @property
    def wire_bytes(self) -> int:
        """Bytes of one token on its way to the experts, forward."""
        if self.wire == "mxfp8":
            return _round_up(self.dim + self.dim // MX_BLOCK, ROW_ALIGN)
        return self.dim * self.dtype.itemsize

    @property
    def told(self) -> int:
        """int32 that a rank tells another about a dispatch: counts, tokens for each, terms."""
        return self.num_experts + self.world_size + NUM_TERMS

    @property
    def meta_slots(self) -> int:
        """Routes that one row of the receive buffer can stand for."""
        return self.top_k if self.dedup else 1

    def fields(self) -> dict[str, Field]:
        """Return the arrays on the heap by name.

        ``signals`` are epochs by kind and source. Of everything else there are two, for even and
        odd epochs: ``counts`` by source; ``rows`` with the ``weight``, the row among the experts'
        rows (``row``, dedup) and the slot at its owner (``origin``, push) of each. Results are in
        ``results`` where they are pulled from or pushed to, with a scalar for each in ``scalars``.
        """
        P, S, pushed = self.num_places, self.meta_slots, self.combine == "push"
        Q = self.max_tokens * self.top_k if pushed else P
        scalars = (2, Q) if pushed else (2, P, S)
        shapes: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            ("signals", (NUM_KINDS, self.world_size), torch.int64),
            ("counts", (2, self.world_size, self.told), torch.int32),
            ("rows", (2, P, self.row_bytes), torch.uint8),
            ("weight", (2, P, S), self.wide),
            ("row", (2, P, S) if self.dedup else (2, 0), torch.int32),
            ("origin", (2, P) if pushed else (2, 0), torch.int32),
            ("results", (2, Q, self.row_bytes), torch.uint8),
            ("scalars", scalars, self.wide),
        ]
        if self.staged:
            T, K = self.max_tokens, self.top_k
            shapes += [
                ("stage_counts", (self.told,), torch.int32),
                ("stage_rows", (T, self.row_bytes), torch.uint8),
                ("stage_weight", (T, K), self.wide),
                ("stage_results", (T, K, self.row_bytes), torch.uint8),
                ("stage_scalars", (T, K), self.wide),
            ]
        at, fields = 0, {}
        for name, shape, dtype in shapes:
            fields[name] = Field(at, shape, dtype)
            at += _round_up(fields[name].num_bytes, FIELD_ALIGN)
        return fields

    @property
    def heap_bytes(self) -> int:
        """Bytes of symmetric memory of each rank."""
        last = list(self.fields().values())[-1]
        return last.at + _round_up(last.num_bytes, FIELD_ALIGN)

    def grown(self, rows: int) -> "RowPlan":
        """Return the plan with a buffer for at least this many rows, and some to spare.

        For a step that is repeated since more rows came than fit: ``rows`` is what
        ``RowwiseDispatcher.most_rows`` says, the same on every rank.

        Examples:
            >>> plan = RowPlan(world_size=2, num_experts=4, max_tokens=100, top_k=2, dim=8,
            ...                overflow="retry", capacity_factor=1.0)
            >>> plan.capacity, plan.grown(rows=320).capacity, plan.grown(rows=10**6).capacity
            (200, 360, 400)
        """
        if self.capacity_factor is None:
            return self
        mean = max(1, self.max_tokens * self.top_k)
        factor = max(self.capacity_factor, math.ceil(9 * rows / 8) / mean)
        return dataclasses.replace(self, capacity_factor=factor)

    def memory(self) -> "Memory":
        """Return what one dispatcher and one layer in flight need, in bytes of each rank."""
        row, wide = self.dim * self.dtype.itemsize, self.wide.itemsize
        slots = self.max_tokens * self.top_k
        meta = self.num_places * self.meta_slots * (4 + wide) if self.dedup else 0
        return Memory(
            heap=self.heap_bytes,
            rows=self.capacity * row,
            results=self.capacity * row,
            saved=slots * 4 * 4 + self.capacity * wide + meta,
            tokens=self.max_tokens * row,
        )


class Memory(NamedTuple):
    """Bytes of one rank.

    Attributes:
        heap: Symmetric memory, once for all layers.
        rows: ``x_RD`` of one layer, where it is copied out of the receive buffer.
        results: ``y_RD`` of one layer, which backward needs for the gradient of the weights
            unless the experts apply them.
        saved: What backward needs beside: slots, and weights of rows.
        tokens: ``y_TD`` of one layer.
    """

    heap: int
    rows: int
    results: int
    saved: int
    tokens: int

    @property
    def layer(self) -> int:
        """Of one layer between its forward and its backward."""
        return self.rows + self.results + self.saved + self.tokens


def _check_choices(plan: RowPlan) -> None:
    choices = {
        "overflow": ("exact", "capacity", "retry"),
        "combine": ("pull", "push"),
        "wire": ("plain", "mxfp8"),
        "dtype": DTYPES,
        "weight_dtype": (torch.float32, torch.float64),
    }
    for name, allowed in choices.items():
        if getattr(plan, name) not in allowed:
            raise ValueError(f"{name} must be one of {list(allowed)}, got {getattr(plan, name)!r}")
    if (plan.overflow == "exact") != (plan.capacity_factor is None):
        raise ValueError(
            f"capacity_factor belongs to overflow 'capacity' and 'retry', and to no other: "
            f"overflow is {plan.overflow!r}, capacity_factor is {plan.capacity_factor}"
        )
    if plan.capacity_factor is not None and not 0 < plan.capacity_factor < math.inf:
        raise ValueError(f"capacity_factor must be above 0, got {plan.capacity_factor}")
    if plan.staged and (plan.dedup or plan.combine == "push"):
        raise ValueError(
            f"staged goes with neither dedup nor combine 'push', "
            f"got dedup {plan.dedup} and combine {plan.combine!r}"
        )
    if plan.wire == "mxfp8" and (plan.dim % MX_BLOCK or plan.dtype == torch.float64):
        raise ValueError(
            f"wire 'mxfp8' needs dim to be a multiple of {MX_BLOCK} and no float64 rows, "
            f"got {plan.dim} and {plan.dtype}"
        )


def _round_up(number: int, multiple: int) -> int:
    return (number + multiple - 1) // multiple * multiple
