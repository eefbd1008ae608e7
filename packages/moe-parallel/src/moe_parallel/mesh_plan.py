"""Which rank holds what: the shape of a mesh, checked before any process group exists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields


class MeshError(ValueError):
    """A layout that cannot be. The message lists every rule that is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """A legal layout of ranks. It checks itself when made.

    One order of the ranks has two views. Dense parameters see (pp, dp), experts see
    (pp, edp, ep), and ``dp = edp * ep``::

        rank = ((pp_rank * edp) + edp_rank) * ep + ep_rank,    dp_rank = edp_rank * ep + ep_rank

    The ep coordinate runs fastest, so an EP group is a run of neighbouring ranks, which share
    an NVLink domain. The pp coordinate runs slowest, so that the least traffic travels farthest.

    Attributes:
        world_size: Number of ranks.
        pp: Pipeline stages.
        ep: Ranks that share one set of experts; each holds ``num_experts / ep`` of them.
        num_experts: Experts of a layer over the whole model, if known.
        num_layers: Layers of the model, if known.
        nvlink_domain: Ranks ``[k * nvlink_domain, (k + 1) * nvlink_domain)`` reach each other
            by NVLink.
    """

    world_size: int
    pp: int = 1
    ep: int = 1
    num_experts: int | None = None
    num_layers: int | None = None
    nvlink_domain: int = 8

    def __post_init__(self) -> None:
        errors = _not_positive(self) or _pipeline_errors(self) + _expert_errors(self)
        if errors:
            raise MeshError("impossible mesh:" + "".join(f"\n  - {error}" for error in errors))

    @property
    def dp(self) -> int:
        """Ranks of a stage: each has all dense parameters of that stage."""
        return self.world_size // self.pp

    @property
    def edp(self) -> int:
        """Replicas of every expert."""
        return self.dp // self.ep

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return ``(pp_rank, edp_rank, ep_rank)`` of a rank."""
        if not 0 <= rank < self.world_size:
            raise MeshError(f"rank must be in 0..{self.world_size - 1}, got {rank}")
        return rank // self.dp, rank % self.dp // self.ep, rank % self.ep

    def dp_groups(self) -> list[tuple[int, ...]]:
        """Ranks that hold the same dense parameters, a tuple per stage."""
        return self._groups(lambda pp, edp, ep: (pp,))

    def ep_groups(self) -> list[tuple[int, ...]]:
        """Ranks that together hold one set of experts and exchange tokens."""
        return self._groups(lambda pp, edp, ep: (pp, edp))

    def edp_groups(self) -> list[tuple[int, ...]]:
        """Ranks that hold the same experts."""
        return self._groups(lambda pp, edp, ep: (pp, ep))

    def pp_groups(self) -> list[tuple[int, ...]]:
        """Ranks that pass activations to each other, in the order of the stages."""
        return self._groups(lambda pp, edp, ep: (edp, ep))

    def describe(self) -> str:
        """Say in words who shares what.

        Examples:
            >>> print(plan_mesh(4, ep=2, num_experts=8).describe())
            4 ranks = pp 1 x edp 2 x ep 2; dp = edp x ep = 2 x 2 = 4
            stage 0 of 1: ranks 0-3
              dense parameters: on ranks 0-3 (4 replicas, gradients summed over them)
              experts 0-3: on ranks 0,2 (2 replicas, gradients summed over them)
              experts 4-7: on ranks 1,3 (2 replicas, gradients summed over them)
              tokens travel among ranks 0-1 | 2-3
        """
        lines = [
            f"{self.world_size} ranks = pp {self.pp} x edp {self.edp} x ep {self.ep}; "
            f"dp = edp x ep = {self.edp} x {self.ep} = {self.dp}"
        ]
        for stage, ranks in enumerate(self.dp_groups()):
            lines.append(f"stage {stage} of {self.pp}: ranks {_span(ranks)}")
            if stage == 0:
                lines += self._describe_first_stage(ranks)
            else:
                lines.append(f"  as stage 0, with {stage * self.dp} added to each rank")
        return "\n".join(lines)

    def _describe_first_stage(self, ranks: tuple[int, ...]) -> list[str]:
        lines = [f"  dense parameters: on ranks {_span(ranks)} ({_replicas(self.dp)})"]
        for ep_rank, sharers in enumerate(self.edp_groups()[: self.ep]):
            if self.num_experts is None:
                what = f"experts of ep rank {ep_rank}"
            else:
                each = self.num_experts // self.ep
                what = f"experts {_span(range(ep_rank * each, (ep_rank + 1) * each))}"
            lines.append(f"  {what}: on ranks {_span(sharers)} ({_replicas(self.edp)})")
        travel = " | ".join(_span(group) for group in self.ep_groups()[: self.edp])
        lines.append(
            f"  tokens travel among ranks {travel}" if self.ep > 1 else "  no token travels"
        )
        return lines

    def _groups(self, key: Callable[[int, int, int], tuple[int, ...]]) -> list[tuple[int, ...]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(key(*self.coordinates(rank)), []).append(rank)
        return [tuple(ranks) for ranks in groups.values()]


def plan_mesh(
    world_size: int,
    *,
    pp: int = 1,
    ep: int = 1,
    num_experts: int | None = None,
    num_layers: int | None = None,
    nvlink_domain: int = 8,
) -> MeshPlan:
    """Lay out ``world_size`` ranks, or say everything that is wrong with the request.

    Args:
        world_size: Number of ranks.
        pp: Pipeline stages; must divide ``world_size`` and not exceed ``num_layers``.
        ep: Ranks that share one set of experts; must divide the ranks of a stage and
            ``num_experts``, and its groups must not straddle NVLink domains.
        num_experts: Experts of a layer; None leaves that rule out.
        num_layers: Layers of the model; None leaves that rule out.
        nvlink_domain: Ranks that reach each other by NVLink: 8 in an HGX node, 72 in an NVL72.

    Raises:
        MeshError: If a rule is broken. The message names all of them, each with both numbers
            and the values that would do.

    Examples:
        >>> plan = plan_mesh(16, pp=2, ep=4, num_experts=64)
        >>> plan.dp, plan.edp
        (8, 2)
        >>> plan_mesh(16, ep=3, num_experts=8)
        Traceback (most recent call last):
        moe_parallel.mesh_plan.MeshError: impossible mesh:
          - ep=3 does not divide the 16 ranks of a stage (world_size/pp); usable ep: [1, 2, 4, 8]
          - num_experts=8 cannot be split over ep=3; usable ep: [1, 2, 4, 8]
          - ep=3 does not divide nvlink_domain=8, so a group would straddle two domains; usable \
ep: [1, 2, 4, 8]
    """
    return MeshPlan(
        world_size=world_size,
        pp=pp,
        ep=ep,
        num_experts=num_experts,
        num_layers=num_layers,
        nvlink_domain=nvlink_domain,
    )


def _not_positive(plan: MeshPlan) -> list[str]:
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    optional = {"num_experts", "num_layers"}
    return [
        f"{name} must be a positive integer, got {value!r}"
        for name, value in values.items()
        # bool is an int to Python, and pp=True is a slip to us.
        if not (name in optional and value is None)
        and (not isinstance(value, int) or isinstance(value, bool) or value < 1)
    ]


def _pipeline_errors(plan: MeshPlan) -> list[str]:
    world_size, pp, num_layers = plan.world_size, plan.pp, plan.num_layers
    usable = [d for d in _divisors(world_size) if num_layers is None or d <= num_layers]
    errors = []
    if world_size % pp:
        errors.append(f"pp={pp} does not divide world_size={world_size}; usable pp: {usable}")
    if num_layers is not None and pp > num_layers:
        errors.append(
            f"pp={pp} stages need at least as many layers, got num_layers={num_layers}; "
            f"usable pp: {usable}"
        )
    return errors


def _expert_errors(plan: MeshPlan) -> list[str]:
    ep, num_experts, domain = plan.ep, plan.num_experts, plan.nvlink_domain
    # With an illegal pp there are no stages. Their size would divide the world, so ep must too.
    legal_pp = plan.world_size % plan.pp == 0
    ranks = plan.world_size // plan.pp if legal_pp else plan.world_size
    where = "ranks of a stage (world_size/pp)" if legal_pp else "ranks of the world"

    def straddles(size: int) -> bool:
        # Groups are aligned runs of neighbours. A boundary falls inside one exactly if there
        # is a boundary and it is not a multiple of the size.
        return plan.world_size > domain and domain % size != 0

    usable = [
        d
        for d in _divisors(ranks)
        if not straddles(d) and (num_experts is None or num_experts % d == 0)
    ]
    errors = []
    if ranks % ep:
        errors.append(f"ep={ep} does not divide the {ranks} {where}; usable ep: {usable}")
    if num_experts is not None and num_experts % ep:
        errors.append(
            f"num_experts={num_experts} cannot be split over ep={ep}; usable ep: {usable}"
        )
    if straddles(ep):
        errors.append(
            f"ep={ep} does not divide nvlink_domain={domain}, so a group would straddle two "
            f"domains; usable ep: {usable}"
        )
    return errors


def _divisors(number: int) -> list[int]:
    # Up to what a mesh can have; the list is for people to read.
    return [d for d in range(1, min(number, 4096) + 1) if number % d == 0]


def _span(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and last - first == len(numbers) - 1:
        return f"{first}-{last}"
    return ",".join(map(str, numbers))


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas, gradients summed over them"
