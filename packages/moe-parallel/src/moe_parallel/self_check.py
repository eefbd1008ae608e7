"""Checks that ranks agree, made once at the start, where a difference is still cheap."""

from typing import Literal

import torch.distributed as dist

from moe_parallel.mesh import Mesh


class MismatchError(RuntimeError):
    """Ranks hold different values of something that must be the same."""


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
    values: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    holders: dict[str, list[int]] = {}
    for global_rank, held in zip(dist.get_process_group_ranks(group), values, strict=True):
        holders.setdefault(held, []).append(dist.get_group_rank(mesh.world_group, global_rank))
    if len(holders) > 1:
        listed = "".join(
            f"\n  - {held!r} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for held, ranks in holders.items()
        )
        raise MismatchError(f"{what} differs between ranks:{listed}")
