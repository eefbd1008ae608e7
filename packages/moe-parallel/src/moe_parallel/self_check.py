"""Checks that ranks agree, made once at the start, where a difference is still cheap."""

from typing import Literal

import torch.distributed as dist

from moe_parallel.agreement import MismatchError, require_same, tell_all
from moe_parallel.mesh import Mesh

__all__ = ["MismatchError", "check_same"]


def check_same(
    value: str,
    what: str,
    mesh: Mesh,
    *,
    among: Literal["world", "stage"] | dist.ProcessGroup = "world",
) -> None:
    """Raise on every rank unless ``value`` is the same on all of them.

    A collective call: every rank of the mesh (or of its pipeline stage) makes it.

    Args:
        value: What to compare: a digest of the configuration, say.
        what: Its name in the error.
        mesh: The mesh.
        among: Compare over the whole mesh, or only within each pipeline stage, or over the ranks
            of a group (then all of them make this call).

    Raises:
        MismatchError: On every rank alike, naming each value and the ranks that hold it.
    """
    if mesh.world_group is None:
        return
    group = among
    if isinstance(group, str):
        group = mesh.world_group if group == "world" else mesh.dp_group
    ranks = [
        dist.get_group_rank(mesh.world_group, global_rank)
        for global_rank in dist.get_process_group_ranks(group)
    ]
    require_same(dict(zip(ranks, tell_all(value, group), strict=True)), what)
