"""The process groups that a pipeline talks over."""

from dataclasses import dataclass

import torch.distributed as dist

from moe_parallel.mesh import Mesh, make_groups
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
    def create(cls, mesh: Mesh, schedule: Schedule, *, own_edges: bool | None = None) -> "Links":
        """Make the groups. A collective call: every rank of the mesh makes it.

        Args:
            mesh: This rank's place.
            schedule: Says who sends to whom.
            own_edges: Whether each pair gets a communicator; None decides by the backend.
        """
        world, pipeline = mesh.world_group, mesh.pp_group
        if world is None or pipeline is None:
            return cls(ranks=(0,), control=None, status=None, edges={})
        ranks = tuple(dist.get_process_group_ranks(pipeline))
        pairs = sorted({(r, to) for r in range(schedule.num_ranks) for to, _ in schedule.sends(r)})
        if own_edges is None:
            # gloo matches messages by their sender and tag, whatever else is under way.
            own_edges = "gloo" not in str(dist.get_backend(pipeline))
        if not own_edges:
            edges = dict.fromkeys(pairs, pipeline)
            return cls(ranks=ranks, control=pipeline, status=world, edges=edges)
        pipelines = mesh.plan.pp_groups()
        members = [sorted((own[r], own[to])) for own in pipelines for r, to in pairs]
        names = [pair if mesh.rank in own else None for own in pipelines for pair in pairs]
        made = zip(names, make_groups(members, mesh.rank, world), strict=True)
        control = make_groups(pipelines, mesh.rank, world, "gloo")
        (status,) = make_groups([range(mesh.plan.world_size)], mesh.rank, world, "gloo")
        return cls(
            ranks=ranks,
            control=next(group for group in control if group is not None),
            status=status,
            edges={pair: group for pair, group in made if pair is not None and group is not None},
        )
