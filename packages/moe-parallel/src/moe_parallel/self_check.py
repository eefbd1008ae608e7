"""Checks that ranks agree, made once at the start, where a difference is still cheap."""

from typing import Literal

import torch.distributed as dist

from moe_parallel.mesh import Mesh


class MismatchError(RuntimeError):
    """Ranks hold different values of something that must be the same."""


def check_same(
    value: str, what: str, mesh: Mesh, *, among: Literal["world", "stage"] = "world"
) -> None:
    """Raise on every rank unless ``value`` is the same on all of them.

    A collective call: every rank of the mesh (or of its pipeline stage) makes it.

    Args:
        value: What to compare: a digest of the configuration, say.
        what: Its name in the error.
        mesh: The mesh.
        among: Compare over the whole mesh, or only within each pipeline stage.

    Raises:
        MismatchError: On every rank alike, naming each value and the ranks that hold it.
    """
    group = mesh.world_group if among == "world" else mesh.dp_group
    if group is None:
        return
    values: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    first = 0 if among == "world" else mesh.pp_rank * mesh.plan.dp
    holders: dict[str, list[int]] = {}
    for rank, held in enumerate(values, start=first):
        holders.setdefault(held, []).append(rank)
    if len(holders) > 1:
        listed = "".join(
            f"\n  - {held!r} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for held, ranks in holders.items()
        )
        raise MismatchError(f"{what} differs between ranks:{listed}")
