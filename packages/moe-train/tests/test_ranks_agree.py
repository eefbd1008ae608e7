"""Ranks that were not started alike do not train together."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import moe_train.run as job
import pytest
import torch.distributed as dist
from moe_parallel import MismatchError
from moe_train.config import RunConfig
from moe_train.ranks import RankInfo


def start(group: dist.ProcessGroup, config: RunConfig, seeds: list[int]) -> str:
    """Start a run on this rank, in the group that there is, and return what is refused."""
    rank = dist.get_rank(group)
    config = replace(config, data=replace(config.data, seed=seeds[rank]))
    with mock.patch.object(job, "join"):
        try:
            job.run(config, RankInfo(rank, rank, len(seeds)))
        except MismatchError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("odd", [0, 3])
def test_settings_that_differ_on_one_rank_are_refused_on_all(
    pool, tiny_config, tmp_path: Path, odd
) -> None:
    # Not one of the optimizer, which compares its own settings.
    seeds = [int(rank == odd) for rank in range(4)]
    for said in pool.run(start, 4, replace(tiny_config, run_dir=tmp_path / "run"), seeds):
        assert "differ" in said
        assert f"on rank {odd}" in said
    assert not (tmp_path / "run" / "checkpoints").exists()
