"""Where parameters lie: which bucket, which place in it. Arithmetic only, no memory."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch.nn import Parameter

from moe_parallel.mesh import Mesh

# Parameters start, and shards end, at multiples of this many elements. Kernels that read 16
# bytes at a time then find every weight aligned, and the vectorised AdamW of the CPU has no
# remainder loop, whose last bit differs: an element's update does not depend on where it lies.
ALIGNMENT = 64

Rule = Literal["adamw", "muon"]


@dataclass(frozen=True, slots=True, eq=False)
class ParamSpec:
    """A parameter and how to treat it.

    Attributes:
        name: Its name in the whole model, the same in every layout.
        parameter: This rank's tensor: all of it, or this rank's experts on the first axis.
            float32, float64 or bfloat16. One with ``requires_grad=False`` stays as it is.
        is_expert: Whether it is divided over the EP group.
        weight_decay: Whether the configured weight decay applies, or one of its own.
        rule: How it is updated. ``muon`` is for matrices: a dense parameter of two axes, or
            experts of one matrix each on three.
        shared_by: Ranks of the pipeline that each hold a copy, under this name: a tied embedding
            at both ends. Their gradients are summed. None: this rank's stage alone. (Two stages
            of one rank share a tensor, which is named once.)
        lr_scale: Its learning rate, as a multiple of the one that ``step`` is given. Its weight
            decay, which is per unit of learning rate, scales too.
    """

    name: str
    parameter: Parameter
    is_expert: bool
    weight_decay: bool | float
    rule: Rule = "adamw"
    shared_by: tuple[int, ...] | None = None
    lr_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Segment:
    """The place of one parameter in a bucket.

    Attributes:
        name: Name of the parameter.
        shape: Its shape on this rank.
        start: Its first element in the bucket.
        numel: Its number of elements on this rank.
        global_shape: Its shape in the whole model.
        global_start: Where this rank's part begins in the whole tensor, read as one line.
        weight_decay: Whether the configured weight decay applies, or one of its own.
        granule: Its place is a multiple of this many elements.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    global_shape: tuple[int, ...]
    global_start: int
    weight_decay: bool | float
    granule: int = ALIGNMENT

    @property
    def stop(self) -> int:
        """One past its last element in the bucket."""
        return self.start + self.numel

    @property
    def padded_stop(self) -> int:
        """Where the next parameter may start."""
        return round_up(self.stop, self.granule)


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """What a bucket holds. The same on all ranks of the group that shares it.

    Attributes:
        is_expert: Shared by the EDP group (else by the DP group).
        dtype: Dtype of its parameters.
        trainable: Whether they get gradients.
        segments: The parameters, in order.
        matrix: For Muon, the shape of every matrix in it. A slice ends between two of them, so
            that each is whole on one rank. None for AdamW, to which all elements are alike.
        shared_by: Ranks of the pipeline that share it; None if one does.
        lr_scale: Learning rate of its parameters, as a multiple of the step's.
    """

    is_expert: bool
    dtype: torch.dtype
    trainable: bool
    segments: tuple[Segment, ...]
    matrix: tuple[int, int] | None = None
    shared_by: tuple[int, ...] | None = None
    lr_scale: float = 1.0

    @property
    def granule(self) -> int:
        """A rank's slice is a multiple of this many elements."""
        return math.prod(self.matrix) if self.matrix else ALIGNMENT


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below ``number``."""
    return -(-number // multiple) * multiple


def check_specs(specs: Sequence[ParamSpec], mesh: Mesh, num_experts: int) -> None:
    """Refuse parameters that cannot be laid out.

    Raises:
        ValueError: If there are none in a world of one rank, a name or tensor occurs twice, a
            dtype is not supported, devices differ, two share memory, or an expert parameter does
            not hold ``num_experts / ep`` experts.
    """
    ep = mesh.plan.ep
    if not specs and mesh.world_group is None:
        raise ValueError("there are no parameters")
    if num_experts % ep:
        raise ValueError(f"num_experts={num_experts} cannot be split over ep={ep}")
    if mesh.plan.num_experts not in (None, num_experts):
        raise ValueError(
            f"num_experts={num_experts}, but the mesh is for {mesh.plan.num_experts} experts"
        )
    names: set[str] = set()
    owners: dict[int, str] = {}
    for spec in specs:
        parameter, shape = spec.parameter, tuple(spec.parameter.shape)
        if spec.name in names:
            raise ValueError(f"the name {spec.name!r} occurs twice")
        names.add(spec.name)
        twin = owners.setdefault(id(parameter), spec.name)
        if twin != spec.name:
            raise ValueError(f"{twin!r} and {spec.name!r} are one tensor: name it once")
        if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise ValueError(
                f"{spec.name} is {parameter.dtype}; it must be float32, float64 or bfloat16"
            )
        first = specs[0]
        if parameter.device != first.parameter.device:
            raise ValueError(
                f"{spec.name} is on {parameter.device}, {first.name} on {first.parameter.device}"
            )
        if spec.is_expert and (not shape or shape[0] != num_experts // ep):
            raise ValueError(
                f"{spec.name} has shape {shape}; its first axis must hold num_experts/ep = "
                f"{num_experts}/{ep} = {num_experts // ep} experts"
            )
        _check_treatment(spec, mesh)
    _check_memory(specs)


def _check_memory(specs: Sequence[ParamSpec]) -> None:
    """Refuse two parameters in one memory, which would part when they move into the buffers."""
    spans = []
    for spec in specs:
        parameter = spec.parameter
        if parameter.numel() and parameter.device.type != "meta":
            size = parameter.element_size()
            axes = zip(parameter.shape, parameter.stride(), strict=True)
            extent = 1 + sum((length - 1) * stride for length, stride in axes)
            # One that leaves gaps may have another in them: of it only the first element counts.
            reach = size * (extent if extent == parameter.numel() else 1)
            spans.append((parameter.data_ptr(), parameter.data_ptr() + reach, spec.name))
    spans.sort()
    for (_, stop, name), (start, _, following) in pairwise(spans):
        if start < stop:
            raise ValueError(
                f"{name!r} and {following!r} share memory, and would no longer do so in the "
                "optimizer: make them one Parameter, and name it once"
            )


def _check_treatment(spec: ParamSpec, mesh: Mesh) -> None:
    shape, axes = tuple(spec.parameter.shape), 3 if spec.is_expert else 2
    if spec.rule == "muon" and (len(shape) != axes or not spec.parameter.numel()):
        raise ValueError(
            f"{spec.name} has shape {shape}; Muon is for matrices, so it needs {axes} axes, "
            "none of length 0"
        )
    if spec.rule not in ("adamw", "muon"):
        raise ValueError(f"{spec.name} has rule={spec.rule!r}; it must be 'adamw' or 'muon'")
    if not (math.isfinite(spec.weight_decay) and spec.weight_decay >= 0):
        raise ValueError(
            f"{spec.name} has weight_decay={spec.weight_decay}; it must be finite, 0 or more"
        )
    if not (math.isfinite(spec.lr_scale) and spec.lr_scale >= 0):
        raise ValueError(f"{spec.name} has lr_scale={spec.lr_scale}; it must be finite, 0 or more")
    shared_by, pp = spec.shared_by, mesh.plan.pp
    if shared_by is not None and (
        spec.is_expert
        or len(shared_by) < 2
        or list(shared_by) != sorted(set(shared_by) & set(range(pp)))
        or mesh.pp_rank not in shared_by
    ):
        raise ValueError(
            f"{spec.name} has shared_by={shared_by}; it must list at least 2 of the pipeline ranks "
            f"0..{pp - 1} in order, this one ({mesh.pp_rank}) among them, and is not for experts"
        )


def plan_buckets(
    specs: Sequence[ParamSpec], mesh: Mesh, num_experts: int, bucket_elements: int
) -> Iterator[tuple[BucketLayout, list[Parameter]]]:
    """Fill buckets in the order of ``specs``: one kind, dtype, trainability and rate to a bucket.

    A bucket is closed when the next parameter would take it past ``bucket_elements``. A
    parameter is never divided between buckets, so a larger one gets a bucket of its own.

    Yields:
        Each layout with its parameters, in the same order on every rank of a stage.
    """
    kinds: dict[_BucketKey, list[ParamSpec]] = {}
    for spec in specs:
        kinds.setdefault(_BucketKey.of(spec), []).append(spec)
    for key, members in kinds.items():
        segments: list[Segment] = []
        parameters: list[Parameter] = []
        for spec in members:
            start = segments[-1].padded_stop if segments else 0
            if segments and start + spec.parameter.numel() > bucket_elements:
                yield key.layout(segments), parameters
                segments, parameters, start = [], [], 0
            segments.append(_segment(spec, start, mesh, num_experts, key.matrix))
            parameters.append(spec.parameter)
        yield key.layout(segments), parameters


class _BucketKey(NamedTuple):
    """What the parameters of a bucket have in common."""

    is_expert: bool
    dtype: torch.dtype
    trainable: bool
    matrix: tuple[int, int] | None
    shared_by: tuple[int, ...] | None
    lr_scale: float

    @classmethod
    def of(cls, spec: ParamSpec) -> "_BucketKey":
        parameter = spec.parameter
        matrix = None
        if spec.rule == "muon" and parameter.requires_grad:
            matrix = parameter.shape[-2], parameter.shape[-1]
        return cls(
            spec.is_expert,
            parameter.dtype,
            parameter.requires_grad,
            matrix,
            spec.shared_by,
            spec.lr_scale,
        )

    def layout(self, segments: list[Segment]) -> BucketLayout:
        return BucketLayout(
            self.is_expert,
            self.dtype,
            self.trainable,
            tuple(segments),
            self.matrix,
            self.shared_by,
            self.lr_scale,
        )


def _segment(
    spec: ParamSpec,
    start: int,
    mesh: Mesh,
    num_experts: int,
    matrix: tuple[int, int] | None,
) -> Segment:
    shape = tuple(spec.parameter.shape)
    numel = math.prod(shape)
    return Segment(
        name=spec.name,
        shape=shape,
        start=start,
        numel=numel,
        global_shape=(num_experts, *shape[1:]) if spec.is_expert else shape,
        global_start=mesh.ep_rank * numel if spec.is_expert else 0,
        weight_decay=spec.weight_decay,
        granule=math.prod(matrix) if matrix else ALIGNMENT,
    )
