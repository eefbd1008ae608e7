"""The process groups that a pipeline talks over."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from moe_parallel.mesh import Mesh
from moe_parallel.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Process groups of one rank of a pipeline.

    On NCCL every ordered pair of neighbours has a communicator of its own. Operations of one
    communicator run in the order in which they were issued, so with a shared one a send that
    waits for its receiver would hold up the receive that the receiver waits for.

    Attributes:
        ranks: Global rank of each rank of the pipeline.
        control: Carries headers, on the CPU. None in a pipeline of one rank.
        status: Carries the outcome of a step among all ranks of the mesh, on the CPU. None if
            the mesh has one rank.
        edges: Carries tensors, by (sender, receiver) in the pipeline.
    """

    ranks: tuple[int, ...]
    control: dist.ProcessGroup | None
    status: dist.ProcessGroup | None
    edges: dict[tuple[int, int], dist.ProcessGroup]

    @classmethod
    def create(cls, mesh: Mesh, schedule: Schedule) -> "Links":
        """Make the groups. A collective call: every rank of the mesh makes it."""
        world, pipeline = mesh.world_group, mesh.pp_group
        if world is None or pipeline is None:
            return cls(ranks=(0,), control=None, status=None, edges={})
        ranks = tuple(dist.get_process_group_ranks(pipeline))
        pairs = sorted({(r, to) for r in range(schedule.num_ranks) for to, _ in schedule.sends(r)})
        if "gloo" in str(dist.get_backend(pipeline)):
            # gloo matches messages by their sender and tag, whatever else is under way.
            edges = dict.fromkeys(pairs, pipeline)
            return cls(ranks=ranks, control=pipeline, status=world, edges=edges)
        me = mesh.pp_rank
        edges = {
            (r, to): _new_group([ranks[r], ranks[to]], None) for r, to in pairs if me in (r, to)
        }
        return cls(
            ranks=ranks,
            control=_new_group(ranks, "gloo"),
            status=_new_group(dist.get_process_group_ranks(world), "gloo"),
            edges=edges,
        )


def _new_group(ranks: Iterable[int], backend: str | None) -> dist.ProcessGroup:
    # Only members take part, so that the thousands of pairs of a large mesh are made at once.
    made = dist.new_group(sorted(ranks), backend=backend, use_local_synchronization=True)
    if not isinstance(made, dist.ProcessGroup):
        raise RuntimeError(f"this rank is not one of {sorted(ranks)}")
    return made
