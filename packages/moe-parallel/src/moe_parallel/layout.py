"""Where parameters lie: which bucket, which place in it. Arithmetic only, no memory."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from moe_parallel.mesh import Mesh

# Parameters start, and shards end, at multiples of this many elements. Kernels that read 16
# bytes at a time then find every weight aligned, and the vectorised AdamW of the CPU has no
# remainder loop, whose last bit differs: an element's update does not depend on where it lies.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class ParamSpec:
    """A parameter and how to treat it.

    Attributes:
        name: Its name in the whole model, the same in every layout.
        parameter: This rank's tensor: all of it, or this rank's experts on the first axis.
            float32, float64 or bfloat16. One with ``requires_grad=False`` stays as it is.
        is_expert: Whether it is divided over the EP group.
        weight_decay: Whether weight decay applies.
    """

    name: str
    parameter: Parameter
    is_expert: bool
    weight_decay: bool


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
        weight_decay: Whether weight decay applies.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    global_shape: tuple[int, ...]
    global_start: int
    weight_decay: bool

    @property
    def stop(self) -> int:
        """One past its last element in the bucket."""
        return self.start + self.numel

    @property
    def padded_stop(self) -> int:
        """Where the next parameter may start."""
        return round_up(self.stop, ALIGNMENT)


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """What a bucket holds. The same on all ranks of the group that shares it.

    Attributes:
        is_expert: Shared by the EDP group (else by the DP group).
        dtype: Dtype of its parameters.
        trainable: Whether they get gradients.
        segments: The parameters, in order.
    """

    is_expert: bool
    dtype: torch.dtype
    trainable: bool
    segments: tuple[Segment, ...]


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below ``number``."""
    return -(-number // multiple) * multiple


def check_specs(specs: Sequence[ParamSpec], mesh: Mesh, num_experts: int) -> None:
    """Refuse parameters that cannot be laid out.

    Raises:
        ValueError: If there are none, a name or tensor occurs twice, a dtype is not supported,
            devices differ, or an expert parameter does not hold ``num_experts / ep`` experts.
    """
    ep = mesh.plan.ep
    if not specs:
        raise ValueError("there are no parameters")
    if num_experts % ep:
        raise ValueError(f"num_experts={num_experts} cannot be split over ep={ep}")
    if mesh.plan.num_experts not in (None, num_experts):
        raise ValueError(
            f"num_experts={num_experts}, but the mesh is for {mesh.plan.num_experts} experts"
        )
    names: set[str] = set()
    owners: dict[int, str] = {}
    first = specs[0]
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
        if parameter.device != first.parameter.device:
            raise ValueError(
                f"{spec.name} is on {parameter.device}, {first.name} on {first.parameter.device}"
            )
        if spec.is_expert and (not shape or shape[0] != num_experts // ep):
            raise ValueError(
                f"{spec.name} has shape {shape}; its first axis must hold num_experts/ep = "
                f"{num_experts}/{ep} = {num_experts // ep} experts"
            )


def plan_buckets(
    specs: Sequence[ParamSpec], mesh: Mesh, num_experts: int, bucket_elements: int
) -> Iterator[tuple[BucketLayout, list[Parameter]]]:
    """Fill buckets in the order of ``specs``, one kind, dtype and trainability to a bucket.

    A bucket is closed when the next parameter would take it past ``bucket_elements``. A
    parameter is never divided between buckets, so a larger one gets a bucket of its own.

    Yields:
        Each layout with its parameters, in the same order on every rank of a stage.
    """
    kinds: dict[tuple[bool, torch.dtype, bool], list[ParamSpec]] = {}
    for spec in specs:
        parameter = spec.parameter
        key = (spec.is_expert, parameter.dtype, parameter.requires_grad)
        kinds.setdefault(key, []).append(spec)
    for key, members in kinds.items():
        segments: list[Segment] = []
        parameters: list[Parameter] = []
        for spec in members:
            start = segments[-1].padded_stop if segments else 0
            if segments and start + spec.parameter.numel() > bucket_elements:
                yield BucketLayout(*key, tuple(segments)), parameters
                segments, parameters, start = [], [], 0
            segments.append(_segment(spec, start, mesh, num_experts))
            parameters.append(spec.parameter)
        yield BucketLayout(*key, tuple(segments)), parameters


def _segment(spec: ParamSpec, start: int, mesh: Mesh, num_experts: int) -> Segment:
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
    )
