"""What an optimizer is refused for before it touches a parameter, on every rank alike."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_parallel.agreement import raise_together
from moe_parallel.layout import BucketLayout, ParamSpec, check_specs
from moe_parallel.mesh import Mesh


def check_together(
    specs: Sequence[ParamSpec],
    mesh: Mesh,
    num_experts: int,
    bucket_elements: int,
    wire: str,
    zero: int,
) -> None:
    """Refuse what does not fit. A collective call of the mesh: what one rank finds, all raise.

    Raises:
        ValueError: See the message.
    """
    error: ValueError | None = None
    try:
        _check_settings(mesh, bucket_elements, wire, zero)
        check_specs(specs, mesh, num_experts)
    except ValueError as found:
        error = found
    raise_together(error, mesh.world_group)


def device_of(mesh: Mesh) -> torch.device:
    """Return where a rank without parameters takes part in the norm: where its group works."""
    if "nccl" in str(dist.get_backend(mesh.world_group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def digest_of(layouts: Sequence[BucketLayout]) -> str:
    """Return a hash of what ranks that share these buckets must agree on."""
    # Where a rank's experts begin is the one thing that differs by right.
    plain = [
        (
            (b.is_expert, b.dtype, b.trainable, b.matrix, b.shared_by, b.lr_scale),
            [(s.name, s.shape, s.weight_decay) for s in b.segments],
        )
        for b in layouts
    ]
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:16]


def _check_settings(mesh: Mesh, bucket_elements: int, wire: str, zero: int) -> None:
    if bucket_elements < 1:
        raise ValueError(f"bucket_elements must be positive, got {bucket_elements}")
    if wire not in ("float32", "bfloat16"):
        raise ValueError(f"wire must be 'float32' or 'bfloat16', got {wire!r}")
    if zero not in (1, 2):
        raise ValueError(f"zero must be 1 or 2, got {zero!r}")
    if zero == 2 and mesh.plan.pp > 1:
        raise ValueError(
            f"zero=2 is for one backward a step, and a pipeline (pp={mesh.plan.pp}) has several"
        )
