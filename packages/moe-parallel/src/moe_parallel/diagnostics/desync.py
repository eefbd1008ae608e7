"""What ranks did differently, once a hash has shown that they did."""

from collections.abc import Sequence

import torch.distributed as dist

from moe_parallel.mesh import Mesh


def find_desync(launches: Sequence[tuple[str, int]], mesh: Mesh) -> str | None:
    """Say where the ranks of this stage first differ in what they reduced; None if they do not.

    ``StepStats.desynced`` costs nothing and says that there is a difference. This asks every rank
    of the stage for its list: a collective call.

    Args:
        launches: From ``ShardedAdamW.launches``, before ``step`` clears it, or a copy.
        mesh: This rank's place.

    Examples:
        >>> from moe_parallel import Mesh, plan_mesh
        >>> find_desync([("w", 64)], Mesh.create(plan_mesh(1))) is None
        True
    """
    group = mesh.dp_group
    if group is None:
        return None
    lists: list[list[tuple[str, int]]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(lists, list(launches), group=group)
    first = mesh.pp_rank * mesh.plan.dp
    for place in range(max(map(len, lists))):
        at = [held[place] if place < len(held) else None for held in lists]
        if len(set(at)) > 1:
            told = "".join(
                f"\n  - rank {first + r}: "
                + ("nothing" if entry is None else f"{entry[0]}, {entry[1]} elements")
                for r, entry in enumerate(at)
            )
            return f"ranks differ in reduction {place} of the step:{told}"
    return None
