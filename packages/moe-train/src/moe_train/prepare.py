"""Everything that can be found out and refused before any work."""

from dataclasses import dataclass
from typing import Any

from moe_parallel import MeshPlan, plan_mesh

from moe_train.config import RunConfig
from moe_train.data.training import TrainingData, open_data
from moe_train.folder import RunFolder
from moe_train.resume import check_continuation, find_state, first_target
from moe_train.schedule import check_schedule, planned_total
from moe_train.sinks import check_sinks


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before any work.

    Attributes:
        plan: The mesh.
        data: What is trained on and what is held out.
        folder: The run's folder.
        state: State of the checkpoint to continue from, or None at the beginning.
    """

    plan: MeshPlan
    data: TrainingData
    folder: RunFolder
    state: dict[str, Any] | None


def prepare(config: RunConfig, world_size: int) -> Prepared:
    """Check everything that can be checked before work begins.

    Raises:
        MeshError: If the ranks cannot be divided as asked.
        CorpusError: If there is no text, or the model has not its vocabulary.
        RunError: If the batch cannot be divided, the folder not be used, the run not continued, or
            the schedule does not fit, or the package of a sink is missing.
    """
    mesh = config.mesh
    plan = plan_mesh(
        world_size,
        pp=mesh.pp,
        ep=mesh.ep,
        num_experts=config.model.num_experts,
        num_layers=len(config.model.moe_layers),
        nvlink_domain=mesh.nvlink_domain,
    )
    config.check_batch(plan.dp)
    check_sinks(config.log)
    data = open_data(config.data, config.model.vocab_size, config.run_dir)
    folder = RunFolder(config.run_dir)
    state = find_state(folder)
    if state is not None:
        check_continuation(state, config, data.digest)
    first = first_target(state, config.train.steps)
    check_schedule(config.optimizer, planned_total(config.optimizer, first))
    return Prepared(plan, data, folder, state)
